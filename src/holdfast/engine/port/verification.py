"""What a verification needs of the engine: the gate of a queue, its open jobs, and their correction.

With a ledger, jobs of a queue are claimed and moved only in an epoch in which the queue was verified. If the engine
lacks what the ledger has read, because it was restored from a snapshot for example, the jobs that the ledger knows
better are corrected before. `ledger.verification` does that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from holdfast.core.job import JobInfo
from holdfast.engine.port.jobs import EnginePart
from holdfast.engine.port.reads import QueueGate


class JobName(msgspec.Struct, frozen=True):
    """A job in the engine, or a message that is not a job yet."""

    job_id: str
    tenant_id: str


class VerificationPort(EnginePart, Protocol):
    """The gate of a queue, and what is corrected before it opens. An embedded engine has no gate."""

    def on_unverified(self, verify: Callable[[str], asyncio.Task[None]]) -> None:
        """Call `verify` with each queue whose gate stopped a call; its task ends when the gate was opened."""
        ...

    async def gate(self, queue: str) -> QueueGate:
        """Read the gate."""
        ...

    async def job_names(self, queue: str, cursor: str, limit: int) -> tuple[list[JobName], str]:
        """Return the names of open jobs, from a cursor ("": the beginning), and where to continue ("": nowhere).

        May return a job twice. Returns every job that is open from the first call to the last.
        """
        ...

    async def correct(self, queue: str, epoch: str, jobs: Sequence[JobInfo]) -> list[bool] | None:
        """Put jobs into these states, unless they have ended in the engine; return of each whether it was.

        A job that ended leaves no event; one that is open leaves a `task.restored` event, and a running one becomes
        ready. Returns None and changes nothing if the queue is verified, or the engine has another epoch; while it is
        open without a verification, only jobs that ended are corrected.
        """
        ...

    async def open_gate(self, queue: str, epoch: str, *, verified: bool = True, corrected: bool = False) -> bool:
        """Open the gate in this epoch; return whether the engine still has it.

        If jobs were corrected, appends an entry without events to the feed. An engine that goes back to before the
        corrections does not have it.
        """
        ...
