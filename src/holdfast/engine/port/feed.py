"""`FeedPort`: the feed of moves for the ledger, and what restores an engine that has lost data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from holdfast.core.job import Event, JobInfo


class FeedEntry(msgspec.Struct, frozen=True, gc=False):
    """One atomic step's moves, in order. `nonce` tells an entry from another at the same position after a wipe."""

    position: str
    nonce: str
    events: list[Event]
    #: A durable submission waits for it: do not linger.
    urgent: bool = False
    #: About how many bytes it takes; 0: unknown.
    size: int = 0
    #: Why nothing could be read from it: another program's, damaged, or of a newer release.
    error: str = ""


class EngineSnapshot(msgspec.Struct, frozen=True):
    """A cut through the engine, made in one atomic step: which of the asked jobs it does not know, and where its
    feed ended at that moment (both empty while the feed has never had an entry)."""

    unknown: list[str]
    position: str
    nonce: str
    at_ms: int


class SubmissionKey(msgspec.Struct, frozen=True):
    """An idempotency key that the ledger remembers (requirement E1), to be known to the engine again after a wipe."""

    tenant_id: str
    key: str
    job_id: str
    expires_at_ms: int


class FeedPort(Protocol):
    """The feed of moves, and what restores an engine that has lost data."""

    async def epoch(self, queue: str) -> str:
        """Whose memory the engine has now: another one after a restart or a fail-over, which may have lost some."""
        ...

    async def attach_reader(self, queue: str, incarnation: str = "", *, reminded: bool = False) -> None:
        """From now on nothing unread is dropped from the feed, and with a ledger the queue takes jobs, in this
        incarnation only; without one named, in the present one.

        `reminded`: keys were put back before; the feed says so, if it has said anything, in an entry without events.
        """
        ...

    async def read_feed(self, queue: str, start: str, limit: int) -> list[FeedEntry]:
        """Entries from a position on, that one included, oldest first; `start=""` is the oldest one kept.

        A reader begins at the entry it read last and looks at its nonce: missing or another one means that the feed
        has forked (a wipe, a fail-over to a stale replica).
        """
        ...

    async def wait_feed(self, positions: Mapping[str, str], wait_ms: int) -> list[str]:
        """Queues whose feed has an entry after the given position ("": any); waits up to `wait_ms` for the first."""
        ...

    async def trim_feed(self, queue: str, position: str) -> None:
        """The reader has everything before `position`; the entry at `position` itself is kept (it proves identity),
        and `feed_tail` entries before it."""
        ...

    async def snapshot(self, queue: str, job_ids: Sequence[str]) -> EngineSnapshot:
        """Which of these jobs (at most `MAX_BATCH`) are unknown, and where the feed ends, in one atomic step."""
        ...

    async def restore(self, queue: str, cut: EngineSnapshot, jobs: Sequence[JobInfo]) -> list[bool]:
        """Put lost jobs back under their own id, state, attempt, retry count and due time; whether each was.

        Only jobs that are still unknown, and only while the feed still has the cut's entry under the cut's nonce
        (while it is still empty, if it was; else nothing is restored). `running` jobs go back in line: their lease is
        gone. `next_attempt_at_ms` is when a queued or retrying job is due, `meta.run_at_ms` what its submitter asked
        for. Each leaves a `task.restored` event. Their idempotency keys are known again, for as long as they are open.
        Raises `InvalidOption` and restores nothing if one of them has ended.
        """
        ...

    async def restore_keys(self, queue: str, keys: Sequence[SubmissionKey]) -> None:
        """Know these keys again until they end; one that is known to the engine already stays as it is."""
        ...
