"""The feed of moves: `FeedReadPort` to read it, `FeedPort` also to trim it.

`FeedPort` also restores what the engine has lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from holdfast.core.job import Event, JobInfo
from holdfast.engine.port.jobs import EnginePart


class FeedEntry(msgspec.Struct, frozen=True, gc=False):
    """The moves of one atomic step, in order.

    After a wipe, a feed can have another entry at the same position; `nonce` distinguishes the two.
    """

    position: str
    nonce: str
    events: list[Event]
    #: A durable submission waits for this entry: project it without delay.
    urgent: bool = False
    #: Approximate size in bytes; 0: unknown.
    size: int = 0
    #: Why the entry could not be decoded: written by another program, damaged, or from a newer release.
    error: str = ""


class EngineSnapshot(msgspec.Struct, frozen=True):
    """Which of the given jobs the engine does not know, and where its feed ends, read in one atomic step.

    `position` and `nonce` are empty while the feed has never had an entry.
    """

    unknown: list[str]
    position: str
    nonce: str
    at_ms: int


class SubmissionKey(msgspec.Struct, frozen=True):
    """An idempotency key that the ledger keeps (requirement E1), to restore in the engine after a wipe."""

    tenant_id: str
    key: str
    job_id: str
    expires_at_ms: int
    #: Empty: not known; the key then belongs to every request.
    fingerprint: str = ""


class FeedReadPort(EnginePart, Protocol):
    """The feed of moves, read-only: for event streams, metrics and diagnosis."""

    async def epoch(self, queue: str) -> str:
        """Identity of the engine's current data.

        Changes after a restart or fail-over, which may have lost writes.
        """
        ...

    async def read_feed(self, queue: str, start: str, limit: int) -> list[FeedEntry]:
        """Return entries from position `start`, inclusive, oldest first; `start=""` is the oldest one kept.

        A reader starts at the entry it read last and compares the nonce. If that entry is missing or has another
        nonce, the feed has forked (a wipe, a fail-over to a stale replica).
        """
        ...

    async def wait_feed(self, positions: Mapping[str, str], wait_ms: int) -> list[str]:
        """Wait up to `wait_ms` for entries; return the queues whose feed has one after its position.

        The position "" is before the first entry.
        """
        ...

    async def seek_feeds(self, at_ms: int) -> str:
        """Return a position before every entry that any feed got at this time of the engine's clock, or later.

        Earlier entries may follow it. On a Redis Cluster each server has its own clock.
        """
        ...

    async def is_feed_whole(self, queue: str, position: str) -> bool:
        """Whether the feed still has all of its entries after `position`; if not certain, False.

        Does not notice a feed that was lost with the store's data and began again.
        """
        ...

    async def snapshot(self, queue: str, job_ids: Sequence[str]) -> EngineSnapshot:
        """Read in one atomic step which of these jobs are unknown, and where the feed ends.

        Takes at most `MAX_BATCH` jobs.
        """
        ...


class FeedPort(FeedReadPort, Protocol):
    """The feed of moves for its reader, and the restore of jobs and keys that the engine has lost."""

    async def attach_reader(self, queue: str, epoch: str = "", *, keys_restored: bool = False) -> None:
        """Attach a reader for this epoch (default: the current one).

        While it is attached, nothing unread is dropped from the feed. With a ledger, the queue accepts jobs only in
        this epoch. `keys_restored`: keys were restored before; a feed that is not empty then gets an entry without
        events, which marks that.
        """
        ...

    async def trim_feed(self, queue: str, position: str) -> None:
        """Drop entries before `position`, which the reader has processed.

        The entry at `position` is kept, because it identifies the feed, and so are `feed_tail` entries before it.
        """
        ...

    async def restore(self, queue: str, snapshot: EngineSnapshot, jobs: Sequence[JobInfo]) -> list[bool]:
        """Restore lost jobs; return whether each was restored.

        A job keeps its id, state, attempt, retry count and due time. Restores only jobs that are still unknown.
        Restores nothing unless the feed still has the snapshot's entry with the snapshot's nonce (or is still empty, if
        it was). `running` jobs become ready: their lease is lost. `next_attempt_at_ms` is when a queued or retrying job
        is due, `meta.run_at_ms` what its submitter requested. Each restored job leaves a `task.restored` event. Its
        idempotency key is known again while the job is open. Raises `InvalidOption` and restores nothing if one of the
        jobs is final.
        """
        ...

    async def restore_keys(self, queue: str, keys: Sequence[SubmissionKey]) -> None:
        """Restore these keys until they expire. A key that the engine already knows is not changed."""
        ...
