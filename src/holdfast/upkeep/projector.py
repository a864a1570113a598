"""Write the feed into the ledger, exactly once (rules 14–18).

A lease in the ledger lets one projector work on a feed at a time. It only saves work: rows and position are written in
one transaction, fenced by the old position, so two projectors on one feed are harmless. After a crash:

    read ─────► commit ─────► trim
         1             2           3

1. Nothing is written; the next projector reads the same entries. 2. The entries and the position are written; the next
projector continues after them, and trims. 3. Nothing is left to do. After a commit of unknown outcome, the position
shows whether it is 1 or 2.

Every read begins at the entry that the position names and checks its nonce. If the entry is missing, the feed has
forked (Redis was wiped, or a stale replica took over): the feed is then read from its start, without the entries that
are already written.

While the ledger is unreachable, the feed is retained in the engine. A queue that cannot be projected does not affect
the others: it is dropped, and retried with its own backoff.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from random import uniform
from typing import Final

from holdfast.aio import raise_if_cancelled
from holdfast.core.retry import Backoff
from holdfast.engine.port import Engine
from holdfast.engine.port.feed import FeedEntry
from holdfast.errors import HoldfastError, LedgerUnavailable, Unavailable
from holdfast.identity import new_identity
from holdfast.ledger.port.ledger import FeedPosition, Ledger, PositionMoved, ProjectionResult
from holdfast.ledger.reopen_intake import reopen_intake
from holdfast.ledger.verification import Verifier
from holdfast.observe.counters import Counters
from holdfast.upkeep.dead_letters import DeadLetterConfirmer
from holdfast.upkeep.feed_cursor import SMALLEST_SHARE, FeedCursor, FeedFailure, FeedForked, PendingBatch, is_enough
from holdfast.upkeep.loop import LogThrottle, QueueSelection

_log: Final = logging.getLogger("holdfast.projector")

LEASE_MS: Final = 5_000
#: A batch waits this long for further entries, unless it is large or urgent.
LINGER_S: Final = 0.05
#: While it lingers, it reads this often.
_LINGER_READ_S: Final = 0.005

#: How often to check for new queues, and whether an idle feed is still the same.
_ROUND_S: Final = 1.0
#: Leases renewed in one statement.
_RENEWED: Final = 500
#: Idle feeds that are read for a fork in each round; of more, each is read less often.
_IDLE_READS: Final = 50
#: Longest interval between checks for feeds that have lost their projector or were released.
_STANDBY_S: Final = 2.5
_TRIM_S: Final = 1.0
#: Pause before dead letters that could not be confirmed are tried again.
_CONFIRM_RETRY_S: Final = 5.0
#: A ledger that does not answer must not delay the shutdown for longer.
_RELEASE_S: Final = 1.0
#: How far back decisions are delivered again to an engine that continues from an older state.
_REDELIVER_MS: Final = 24 * 3_600_000


class Projector:
    """Projects the feeds of some queues, or of all that the engine has.

    The caller opens the engine, and closes engine and ledger after `run`.
    """

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger,
        queues: Sequence[str] = (),
        *,
        name: str = "",
        on_fork: Callable[[str], None] | None = None,
        lease_ms: int = LEASE_MS,
        linger_s: float = LINGER_S,
        round_s: float = _ROUND_S,
    ) -> None:
        """`on_fork` is called with the queue of a feed that has forked, where jobs may be lost."""
        assert ledger.projection is not None
        self.name = name or new_identity()
        self._engine = engine
        self._ledger = ledger
        self._projection = ledger.projection
        self._queues = QueueSelection(engine, queues)
        self._confirmer = DeadLetterConfirmer(engine, ledger)
        self._on_fork = on_fork
        self._lease_ms = lease_ms
        self._linger_s = linger_s
        self._round_s = round_s
        self._verifier = Verifier(engine, ledger)
        #: Queue → an entry at or after the last one that the ledger has: the end of the last batch, written or not.
        self._known: dict[str, FeedPosition] = {}
        self._cursors: dict[str, FeedCursor] = {}
        self._failures: dict[str, FeedFailure] = {}
        #: Feeds that other processes project, and when to check them again.
        self._others: set[str] = set()
        self._others_at = 0.0
        #: Since when (wall clock, ms) a queue has events that are not in the ledger.
        self._behind: dict[str, int] = {}
        self._lags: list[int] = []
        self._round_at = 0.0
        self._reopen = True

    @property
    def counts(self) -> Counters:
        """Counters of this process: `projected`, `anomalies`, `forks`, `feed_lag_ms`."""
        return self._engine.counters

    @property
    def lag_ms(self) -> int:
        """Age of the oldest event that is not in the ledger, or that was written in the last pass."""
        return self.counts.feed_lag_ms

    async def run(self) -> None:
        """Project until cancelled; then release the feeds, so that another projector continues immediately."""
        backoff, throttle = Backoff(), LogThrottle(_log)
        #: Last position of each feed.
        positions: dict[str, str] = {}
        try:
            while True:
                try:
                    await self._run_once()
                    backoff.reset()
                    if throttle.reset():
                        _log.info("projector recovered")
                    raise_if_cancelled()
                    continue
                except Unavailable as exc:
                    throttle.log(logging.WARNING, "projector waiting: %s", exc)
                except HoldfastError as exc:
                    throttle.log(logging.ERROR, "projector failing, retrying: %s", exc)
                except Exception:  # noqa: BLE001 - top of a loop
                    _log.exception("projector failed unexpectedly, retrying")
                raise_if_cancelled()
                positions = {queue: cursor.at.position for queue, cursor in self._cursors.items()} | positions
                await self._drop_all()
                await self._vouch()
                await self._measure_unwritten(positions)
                await asyncio.sleep(backoff.next_s())
        finally:
            await self._release_all()

    # One pass ----------------------------------------------------------------------------------------

    async def _run_once(self) -> None:
        """Write a batch of each feed that has one, or wait for the first."""
        self._lags = []
        if time.monotonic() >= self._round_at:
            await self._run_round()
        busy = [cursor for cursor in self._cursors.values() if cursor.ahead is not None]
        # Redis checks timeouts ten times a second: a short wait for idle feeds would delay busy ones by 100 ms.
        wait_ms = 0 if busy else max(1, round((self._round_at - time.monotonic()) * 1000))
        await self._serve(busy + await self._wait(wait_ms))
        self._measure()

    async def _serve(self, cursors: Iterable[FeedCursor]) -> None:
        """Read all feeds, wait once for further entries, then write all, urgent ones first."""
        for cursor in cursors:
            await self._attempt(cursor, self._collect)
        await self._linger()
        due = [(cursor.pending.urgent, cursor) for cursor in self._cursors.values() if cursor.pending is not None]
        for _, cursor in sorted(due, key=lambda pair: not pair[0]):
            await self._attempt(cursor, self._write)

    async def _run_round(self) -> None:
        """Acquire feeds without a projector, renew our leases, and check idle feeds for forks."""
        names = await self._names()
        await self._acquire_free(names)
        now = time.monotonic()
        await self._renew_leases(
            [cursor for cursor in self._cursors.values() if cursor.leased_until - now < self._lease_ms / 2000]
        )
        idle = [cursor for cursor in self._cursors.values() if cursor.ahead is None]
        # So that idle feeds cost the same however many there are.
        stretch = max(1.0, len(idle) / _IDLE_READS)
        await self._serve([cursor for cursor in idle if now - cursor.read_at >= self._round_s * stretch])
        for cursor in list(self._cursors.values()):
            if cursor.confirm_at and now >= cursor.confirm_at:
                self._start_confirming(cursor)
            if now >= cursor.orphan_check_at:
                await self._attempt(cursor, self._resolve_orphans)
            await self._attempt(cursor, self._trim_idle)
        self._round_at = time.monotonic() + self._round_s

    async def _names(self) -> set[str]:
        # Also those that could not be projected: a wiped engine lists no queue before its intake reopens.
        names = {*await self._queues.names(), *self._failures}
        if self._reopen:
            await self._ledger.open()
            if not self._queues.is_explicit:
                # A wiped engine has lost its queues, the ledger still has them.
                names |= set(await self._ledger.recovery.queues())
            self._reopen = False
        return names

    async def _acquire_free(self, names: Iterable[str]) -> None:
        """Acquire free feeds that are due for a check; one query finds those that others have."""
        now = time.monotonic()
        if now >= self._others_at:
            self._others.clear()
            self._others_at = now + min(self._lease_ms / 2000, _STANDBY_S) * uniform(0.5, 1.0)
        free = [queue for queue in names if queue not in self._cursors and queue not in self._others]
        free = [queue for queue in free if queue not in self._failures or now >= self._failures[queue].until]
        if not free:
            return
        self._others |= await self._projection.held_by_others(free, self.name)
        for queue in self._others:
            # Their projectors report the lag.
            self._behind.pop(queue, None)
        for queue in free:
            if queue not in self._others:
                try:
                    await self._acquire(queue)
                except Exception as exc:  # noqa: BLE001 - the other queues continue
                    await self._fail_feed(queue, exc)

    async def _acquire(self, queue: str) -> None:
        at = await self._projection.acquire(queue, self.name, self._lease_ms)
        if at is None:
            self._others.add(queue)
            return
        _log.info("projecting queue %s from %s", queue, at.position or "its start")
        failure = self._failures.get(queue)
        epoch = await self._verifier.ensure(queue)
        cursor = self._cursors[queue] = FeedCursor(queue, at, epoch, failure.share if failure else 1.0)
        self._known[queue] = at
        self._extend_lease(cursor)
        if not at.position:
            # The feed's first reader. A feed that has our position already has our reader attached.
            await reopen_intake(self._engine, self._ledger, queue, insist=True)
        self._start_confirming(cursor)

    async def _renew_leases(self, cursors: Sequence[FeedCursor]) -> None:
        for start in range(0, len(cursors), _RENEWED):
            part = cursors[start : start + _RENEWED]
            try:
                names = [cursor.queue for cursor in part]
                renewed = await self._projection.renew(names, self.name, self._lease_ms)
            except LedgerUnavailable:
                # One of the rows may be the cause; renew each.
                for cursor in part:
                    await self._attempt(cursor, self._renew_lease)
                continue
            for cursor in part:
                self._apply_lease(cursor, renewed.get(cursor.queue))

    async def _renew_lease(self, cursor: FeedCursor) -> None:
        self._apply_lease(cursor, await self._projection.acquire(cursor.queue, self.name, self._lease_ms))

    def _apply_lease(self, cursor: FeedCursor, at: FeedPosition | None) -> None:
        if at is None:
            _log.info("queue %s was acquired by another projector", cursor.queue)
            self._known.pop(cursor.queue, None)
            self._drop(cursor)
        elif at != cursor.at:
            self._restart(cursor, at)
        else:
            self._extend_lease(cursor)

    async def _wait(self, wait_ms: int) -> list[FeedCursor]:
        """Wait for new entries; returns the feeds that have some and are not being read ahead."""
        positions = {
            queue: cursor.pending.batch[-1].position if cursor.pending else cursor.at.position
            for queue, cursor in self._cursors.items()
            if cursor.ahead is None
        }
        if not positions:
            await asyncio.sleep(0 if self._cursors else wait_ms / 1000)
            return []
        try:
            ready = await self._engine.wait_feed(positions, wait_ms)
        except Exception:  # noqa: BLE001 - one of the feeds may be the cause
            # Raises if the engine is unreachable. Otherwise one unreadable feed fails the wait for all: read each.
            await self._engine.now_ms()
            await asyncio.sleep(self._linger_s)
            ready = list(positions)
        return [self._cursors[queue] for queue in ready if queue in self._cursors]

    async def _attempt(self, cursor: FeedCursor, step: Callable[[FeedCursor], Awaitable[None]]) -> None:
        """Run one step for one queue.

        A failure affects that queue only, unless engine or ledger are unreachable.
        """
        if self._cursors.get(cursor.queue) is not cursor:
            return
        try:
            await step(cursor)
        except FeedForked:
            await self._attempt(cursor, self._handle_fork)
        except PositionMoved:
            _log.info("another projector has written queue %s, or the engine has another epoch", cursor.queue)
            self._known.pop(cursor.queue, None)
            self._drop(cursor)
        except Exception as exc:  # noqa: BLE001 - the other queues continue
            await self._fail_feed(cursor.queue, exc)

    async def _fail_feed(self, queue: str, error: Exception) -> None:
        """Drop this queue for a while. Raises if engine or ledger are unreachable."""
        failure = self._failures.setdefault(queue, FeedFailure())
        cursor = self._cursors.get(queue)
        if cursor is not None and isinstance(error, LedgerUnavailable):
            failure.share = max(SMALLEST_SHARE, cursor.share / 2)
        if isinstance(error, Unavailable):
            await self._projection.position(queue)
            await self._engine.now_ms()
        if cursor is not None:
            self._drop(cursor, keep_lag=True)
        self._behind.setdefault(queue, _now_ms())
        failure.again()
        level = logging.WARNING if isinstance(error, Unavailable) else logging.ERROR
        unexpected = None if isinstance(error, HoldfastError) else error
        failure.throttle.log(level, "cannot project queue %s, retrying: %s", queue, error, cause=unexpected)

    def _mark_recovered(self, cursor: FeedCursor) -> None:
        if self._failures.pop(cursor.queue, None) is not None:
            _log.info("projection of queue %s recovered", cursor.queue)

    # A batch ---------------------------------------------------------------------------------------

    async def _collect(self, cursor: FeedCursor) -> None:
        """Read the next batch, if there is one."""
        cursor.read_at = time.monotonic()
        if cursor.detached:
            await self._find_position(cursor)
            return
        if cursor.ahead is None:
            following = cursor.next_batch(await cursor.read(self._engine, cursor.at.position, cursor.at.nonce))
        else:
            following = await cursor.ahead
            cursor.ahead = None
        if following.batch:
            cursor.pending = following
            self._behind[cursor.queue] = _oldest_ms(following.batch) or _now_ms()
        else:
            self._behind.pop(cursor.queue, None)
            self._mark_recovered(cursor)

    async def _linger(self) -> None:
        """Wait briefly for further entries, once for all feeds, unless one has enough or is urgent."""
        until = time.monotonic() + self._linger_s
        while pending := [cursor.pending for cursor in self._cursors.values() if cursor.pending is not None]:
            left_s = until - time.monotonic()
            if left_s <= 0 or any(following.is_enough for following in pending):
                return
            ready = await self._wait(max(1, round(left_s * 1000)))
            if not ready:
                return
            await asyncio.sleep(max(0.0, min(_LINGER_READ_S, until - time.monotonic())))
            for cursor in ready:
                await self._attempt(cursor, self._collect_more)

    async def _collect_more(self, cursor: FeedCursor) -> None:
        if cursor.pending is None:
            await self._collect(cursor)
            return
        last = cursor.pending.batch[-1]
        cursor.pending = cursor.next_batch(
            cursor.pending.batch + await cursor.read(self._engine, last.position, last.nonce)
        )

    async def _write(self, cursor: FeedCursor) -> None:
        """Write the next batch of a feed while the one after it is being read."""
        following, cursor.pending = cursor.pending, None
        assert following is not None
        batch, rest = following.batch, following.rest
        if following.is_enough:
            # There is a backlog: read ahead while the ledger writes.
            cursor.ahead = asyncio.create_task(self._read_ahead(cursor, rest, (rest or batch)[-1]))
        self._known[cursor.queue] = FeedPosition(batch[-1].position, batch[-1].nonce)
        try:
            done = await self._projection.project(
                cursor.queue, self.name, self._lease_ms, cursor.at, batch, following.prepared, epoch=cursor.epoch
            )
        except BaseException:
            cursor.drop_ahead()
            raise
        self._record_written(cursor, batch, done)
        await self._trim(cursor)

    async def _read_ahead(self, cursor: FeedCursor, rest: list[FeedEntry], last: FeedEntry) -> PendingBatch:
        if not is_enough(rest) and not cursor.next_batch(rest).rest:
            rest = rest + await cursor.read(self._engine, last.position, last.nonce)
        following = cursor.next_batch(rest)
        if not following.is_enough:
            return following
        return PendingBatch(following.batch, following.rest, self._projection.prepare(cursor.queue, following.batch))

    def _record_written(self, cursor: FeedCursor, batch: list[FeedEntry], done: ProjectionResult) -> None:
        cursor.at = done.at
        self._extend_lease(cursor)
        counts = self.counts
        counts.projected += done.events
        counts.anomalies += done.anomalies
        counts.slow_batches += done.slow_path
        cursor.share = min(1.0, cursor.share * 2)
        self._mark_recovered(cursor)
        if oldest_ms := _oldest_ms(batch):
            self._lags.append(_now_ms() - oldest_ms)
        self._behind.pop(cursor.queue, None)
        for entry in batch:
            if entry.error:
                counts.anomalies += 1
                _log.error("skipped feed entry %s of queue %s: %s", entry.position, cursor.queue, entry.error)
        if done.anomalies:
            _log.warning("%d events of queue %s did not match the ledger's history", done.anomalies, cursor.queue)
        if done.dead_letters:
            self._start_confirming(cursor)

    # Forks -----------------------------------------------------------------------------------------

    async def _handle_fork(self, cursor: FeedCursor) -> None:
        """Handle a feed that does not have the entry at the position."""
        if await self._projection.position(cursor.queue) != cursor.at:
            # Not a fork: while this process was stopped, another projector continued and trimmed the entry.
            raise PositionMoved(cursor.queue)
        cursor.drop_ahead()
        # Before the position moves: once a feed is read, its idempotency keys count as restored.
        await reopen_intake(self._engine, self._ledger, cursor.queue, insist=True)
        cursor.epoch = await self._verifier.ensure(cursor.queue)
        cursor.detached = True
        self.counts.forks += 1
        _log.error(
            "the feed of queue %s has forked: it does not have entry %s, the last one the ledger read; Redis was "
            "wiped, or a stale replica took over; reading the feed from its start",
            cursor.queue,
            cursor.at.position,
        )
        # Jobs may wait again for decisions already delivered. Also before the position moves, which ends the fork.
        await self._ledger.operators.mark_undelivered(cursor.queue, _REDELIVER_MS)
        cursor.orphan_check_at = 0.0
        if self._on_fork is not None:
            self._on_fork(cursor.queue)

    async def _find_position(self, cursor: FeedCursor) -> None:
        """Read the feed from its start, and find the first entry that the ledger does not have.

        The entries that the ledger has are a prefix of the feed: two forks never converge.
        """
        last = FeedEntry("", "", [])
        while entries := await cursor.read(self._engine, last.position, last.nonce):
            known = await self._projection.already_written(cursor.queue, entries)
            if fresh := [entry for entry in entries if entry.position not in known]:
                # If it cannot be written, the cursor is dropped, and the next projector of the feed handles the fork.
                cursor.pending = cursor.next_batch(fresh)
                self._behind[cursor.queue] = _oldest_ms(fresh) or _now_ms()
                cursor.detached = False
                return
            last = entries[-1]
        # Nothing new yet. The position is moved all the same, to show that this feed is being read.
        if cursor.at != FeedPosition(last.position, last.nonce):
            await self._write_all(cursor, [FeedEntry(last.position, last.nonce, [])])
        cursor.detached = not last.position

    async def _write_all(self, cursor: FeedCursor, entries: list[FeedEntry]) -> None:
        while entries:
            following = cursor.next_batch(entries)
            batch, entries = following.batch, following.rest
            self._known[cursor.queue] = FeedPosition(batch[-1].position, batch[-1].nonce)
            done = await self._projection.project(
                cursor.queue, self.name, self._lease_ms, cursor.at, batch, epoch=cursor.epoch
            )
            self._record_written(cursor, batch, done)

    # Besides batches ----------------------------------------------------------------------------------------

    async def _trim_idle(self, cursor: FeedCursor) -> None:
        await self._trim(cursor, idle=True)

    async def _trim(self, cursor: FeedCursor, *, idle: bool = False) -> None:
        """Drop what the ledger has, but never the entry at the position, which identifies the feed."""
        now = time.monotonic()
        position = cursor.at.position
        if cursor.detached or position == cursor.trimmed_to or (not idle and now - cursor.trimmed_at < _TRIM_S):
            return
        await self._engine.trim_feed(cursor.queue, position)
        cursor.trimmed_to, cursor.trimmed_at = position, now

    def _start_confirming(self, cursor: FeedCursor) -> None:
        if cursor.confirming is not None and not cursor.confirming.done():
            # Repeat after this run.
            cursor.confirm_at = time.monotonic()
            return
        cursor.confirm_at = 0.0
        cursor.confirming = asyncio.create_task(self._confirm_dead_letters(cursor))

    async def _confirm_dead_letters(self, cursor: FeedCursor) -> None:
        try:
            left = await self._confirmer.confirm_all(cursor.queue)
        except HoldfastError as exc:
            _log.info("cannot confirm dead letters of queue %s, retrying: %s", cursor.queue, exc)
            left = 1
        except Exception:  # noqa: BLE001 - top of a task
            _log.exception("confirming dead letters failed unexpectedly, retrying")
            left = 1
        if left:
            cursor.confirm_at = time.monotonic() + _CONFIRM_RETRY_S

    async def _resolve_orphans(self, cursor: FeedCursor) -> None:
        """Write the missing events of orphans, after engine or ledger was replaced or restored."""
        cursor.defer_orphan_check(soon=False)
        if not cursor.at.position:
            return
        events = await self._confirmer.find_orphans(cursor.queue, cursor.at)
        cursor.defer_orphan_check(soon=self._confirmer.has_waiting(cursor.queue))
        if events:
            # Fenced by the position like any other batch; the position does not move.
            await self._write_all(cursor, [FeedEntry(cursor.at.position, cursor.at.nonce, events)])

    def _extend_lease(self, cursor: FeedCursor) -> None:
        cursor.leased_until = time.monotonic() + self._lease_ms / 1000

    def _restart(self, cursor: FeedCursor, at: FeedPosition) -> None:
        """Continue from a position that another projector has moved."""
        cursor.drop_ahead()
        cursor.at, cursor.detached = at, not at.position

    def _drop(self, cursor: FeedCursor, *, keep_lag: bool = False) -> None:
        cursor.drop_ahead()
        if not keep_lag:
            self._behind.pop(cursor.queue, None)
        self._cursors.pop(cursor.queue, None)
        self._round_at = min(self._round_at, time.monotonic() + self._round_s)

    async def _drop_all(self) -> None:
        """After a failure, drop all feeds; they are acquired again at the ledger's positions."""
        for cursor in list(self._cursors.values()):
            cursor.drop_ahead()
            if cursor.confirming is not None:
                cursor.confirming.cancel()
        self._cursors.clear()
        self._round_at = 0.0
        self._reopen = True

    async def _release_all(self) -> None:
        queues = list(self._cursors)
        tasks = [cursor.confirming for cursor in self._cursors.values() if cursor.confirming is not None]
        await self._drop_all()
        try:
            async with asyncio.timeout(_RELEASE_S):
                await asyncio.gather(*tasks, return_exceptions=True)
                for queue in queues:
                    await self._projection.release(queue, self.name)
        except (TimeoutError, HoldfastError) as exc:
            _log.info("queues not released, other projectors acquire them when the leases expire: %r", exc)

    async def _vouch(self) -> None:
        """While the ledger does not answer, open the gates of feeds that have what it certainly read last."""
        try:
            for queue, position in self._known.items():
                await self._verifier.vouch(queue, position)
        except HoldfastError as exc:
            _log.debug("cannot compare the feeds either: %s", exc)

    # Lag ------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        now_ms = _now_ms()
        lags = [now_ms - since_ms for since_ms in self._behind.values()]
        self.counts.feed_lag_ms = max(0, *self._lags, *lags, 0)

    async def _measure_unwritten(self, positions: dict[str, str]) -> None:
        """Measure the lag while nothing can be written: find feeds that have grown."""
        try:
            for queue in await self._engine.wait_feed(positions, 0):
                self._behind.setdefault(queue, _now_ms())
        except HoldfastError as exc:
            _log.debug("cannot read the feeds either: %s", exc)
        self._measure()


def _oldest_ms(entries: Iterable[FeedEntry]) -> int:
    """Time of the first event; 0 if there are no events."""
    return next((entry.events[0].at_ms for entry in entries if entry.events), 0)


def _now_ms() -> int:
    return round(time.time() * 1000)
