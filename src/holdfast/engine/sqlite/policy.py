"""What one engine brings to an operation, whoever's writer runs it: its options and its clock."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.clock import Clock
from holdfast.engine.port import EngineOptions, RetryVia


@dataclass(frozen=True, slots=True)
class Policy:
    """One engine's way of doing things."""

    options: EngineOptions
    clock: Clock
    #: Whether dead letters are written down here when there is no ledger.
    stream_dlq: bool

    def waits_in_pending(self, queue: str) -> bool:
        return self.options.retry_via.get(queue) is RetryVia.PENDING
