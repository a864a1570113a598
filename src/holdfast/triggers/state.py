"""State of a trigger and of its messages: life cycle, health, counters, retry delays (T4, M1).

`InFlightMessage` is one delivery and the state of its handling. `error_reason` gives a failure as one redacted line
that is safe in headers and rows. The `queue_*` metrics are computed from `TriggerCounters` when they are read.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

import msgspec

from holdfast.brokers.port import RawMessage
from holdfast.core.retry import Backoff
from holdfast.core.text import clean
from holdfast.errors import Denied, Fatal, IntakeLimited, IntakeRefused, Unavailable, UsageError
from holdfast.ledger.port.messages import ExecutionStatus
from holdfast.observe.counters import Histogram
from holdfast.observe.redact import redact_and_truncate
from holdfast.triggers.config import AckPolicy
from holdfast.triggers.dedup import DedupTicket
from holdfast.triggers.envelope import MessageEnvelope
from holdfast.triggers.runtime import RuntimeCall, RuntimeResult

#: A history keeps the first and the latest failed attempts.
_FIRST: Final = 5
_LATEST: Final = 20


class Disposition(msgspec.Struct, frozen=True):
    """How to answer the broker, and what to record then."""

    how: AckPolicy
    status: ExecutionStatus
    reason: str = ""


class RetryAfter(msgspec.Struct, frozen=True):
    """Handle the message again after a delay. Its key stays blocked."""

    delay_s: float


class OnHold(msgspec.Struct, frozen=True):
    """Hold the message: a dependency is down, and the message is not the cause."""

    reason: str


#: Result of handling a message; `off`: it is finished.
Next = RetryAfter | OnHold | Literal["off"]


class InFlightMessage:
    """One delivery and the state of its handling."""

    __slots__ = (
        "backoff",
        "began_s",
        "call",
        "ending",
        "envelope",
        "history",
        "key_checks",
        "level",
        "limited",
        "raw",
        "retries",
        "run",
        "started_at_ms",
        "ticket",
        "trace_id",
    )

    def __init__(self, raw: RawMessage) -> None:
        self.raw = raw
        #: Log level of its steps.
        self.level = logging.DEBUG
        #: Set once it is parsed.
        self.envelope: MessageEnvelope | None = None
        self.call: RuntimeCall | None = None
        self.trace_id = ""
        #: When handling began, by the wall clock and by the monotonic clock.
        self.started_at_ms = 0
        self.began_s = 0.0
        #: Attempts after the first one, and why each attempt failed.
        self.retries = 0
        self.history: list[str] = []
        #: Reservation of its key, and result of its run.
        self.ticket: DedupTicket | None = None
        self.run: RuntimeResult | None = None
        self.ending: Disposition | None = None
        #: How often its key was in use elsewhere.
        self.key_checks = 0
        #: Delay between attempts to write its dead letter. Also set once its requeue has been delayed.
        self.backoff: Backoff | None = None
        #: Delay between attempts while its tenant is at an intake limit.
        self.limited: Backoff | None = None

    @property
    def key(self) -> str:
        """Messages with the same key are handled one after the other."""
        return self.raw.key

    def add_failure(self, failure: str) -> None:
        """Add a failed attempt. The history is bounded, so that a message with many retries stays small."""
        self.history.append(failure)
        if len(self.history) > _FIRST + _LATEST:
            del self.history[_FIRST]


REASON_LIMIT: Final = 1_000


def error_reason(exc: BaseException) -> str:
    """The reason as one redacted line. Further lines of an error are cut: they may quote the message."""
    try:
        text = exc.public if isinstance(exc, IntakeLimited) else str(exc)
    except Exception:  # noqa: BLE001 - an error without text is still a failed attempt
        text = ""
    text = " ".join(text.split()) if isinstance(exc, Denied) else text.partition("\n")[0]
    if not isinstance(exc, Denied | UsageError | Unavailable | Fatal | IntakeRefused):
        text = f"{type(exc).__name__}: {text}" if text else type(exc).__name__
    # Cleaned: it is written to headers and rows, and unencodable text would block the message forever.
    return redact_and_truncate(clean(text), REASON_LIMIT)


def retry_delay_s(base: float, multiplier: float, number: int, cap_s: float) -> float:
    """base × multiplier^number, at most `cap_s`."""
    try:
        return min(cap_s, base * multiplier**number)
    except OverflowError:
        return cap_s


class TriggerState(StrEnum):
    """Life cycle of a trigger."""

    NEW = "new"
    RUNNING = "running"
    PAUSED = "paused"
    #: A dependency is down; continues by itself when it is back.
    HOLDING = "holding"
    STOPPING = "stopping"
    STOPPED = "stopped"


class TriggerHealth(msgspec.Struct, frozen=True):
    """Current health. For JSON use `msgspec.to_builtins`."""

    #: `healthy`, `paused`, `holding`, `unhealthy` (not consuming, or the broker does not answer) or `stopped`.
    status: str
    running: bool
    adapter_healthy: bool
    active_workers: int
    paused: bool


@dataclass(slots=True)
class TriggerCounters:
    """Counters of one trigger since its creation."""

    queue: str
    #: Messages delivered by the broker, and messages acknowledged.
    received: int = 0
    acknowledged: int = 0
    #: Finished messages by status.
    consumed: dict[ExecutionStatus, int] = field(default_factory=lambda: dict.fromkeys(ExecutionStatus, 0))
    #: Messages skipped as duplicates.
    dedup_hits: int = 0
    #: Attempts, including failed ones; and attempts after the first one.
    calls: int = 0
    retries: int = 0
    #: From the start of handling a message to its end, in seconds.
    durations: Histogram = field(default_factory=Histogram)
    #: From publishing a message to its receipt, in seconds.
    delays: Histogram = field(default_factory=Histogram)
    #: Running worker loops.
    active_workers: int = 0
    #: Messages in flight, and those of them that wait because a dependency is down.
    in_flight: int = 0
    held: int = 0
    #: Dead letters written.
    dead_letters: int = 0
    #: Deliveries dropped because this consumer no longer owns them.
    lost_messages: int = 0
    #: Messages waiting at the broker; None: unknown.
    lag: int | None = None
    #: Rows of `queue_executions` dropped during a long ledger outage.
    records_lost: int = 0
