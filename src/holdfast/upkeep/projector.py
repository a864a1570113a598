"""Feed → ledger, exactly once (rules 14–18).

One projector works on a feed at a time, by a lease in the ledger that only saves work: rows and position are one
transaction, fenced by the old position, so that two at once do no harm. What happens if it dies here?

    read ─────► commit ─────► trim
         1             2           3

1. nothing is written: the next one reads the same entries. 2. they are written, and the position says so: the next
one goes on behind them, and trims. 3. nothing is left to do. A commit of unknown outcome is 1 or 2: the position knows.

Every read begins at the entry that the position names and looks at its nonce. If it is not there the feed has forked
(Redis was wiped, or a stale replica took over): then the feed is read from its start, without what is written already.

The ledger being down costs nothing but time: the feed waits in the engine. A queue that cannot be projected costs the
others nothing: it is let go, and tried again on its own, later each time.
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
from holdfast.ledger.intake_recovery import reopen_intake
from holdfast.ledger.port.ledger import FeedPosition, Ledger, PositionMoved, ProjectionResult
from holdfast.observe.counters import Counters
from holdfast.upkeep.dead_letters import DeadLetterConfirmer
from holdfast.upkeep.feed_cursor import SMALLEST_SHARE, FeedCursor, FeedFailure, FeedForked, PendingBatch, is_enough
from holdfast.upkeep.loop import LogThrottle, QueueSelection

_log: Final = logging.getLogger("holdfast.projector")

LEASE_MS: Final = 5_000
#: A batch waits this long for company, unless it is large or in a hurry.
LINGER_S: Final = 0.05
#: While it lingers, it looks for more this often.
_LOOK_S: Final = 0.005

#: How often to look for new queues, and whether an idle feed is still the same.
_ROUND_S: Final = 1.0
#: How often, at least, to look for feeds that have lost their projector or were given back.
_STAND_BY_S: Final = 2.5
_TRIM_S: Final = 1.0
#: Dead letters that could not be told are tried again after this.
_LETTERS_S: Final = 5.0
#: A ledger that does not answer must not hold up the end.
_GIVE_BACK_S: Final = 1.0
#: How far back people's answers are told again to an engine that has woken up as it was some time ago.
_FORGOTTEN_MS: Final = 24 * 3_600_000


class Projector:
    """Projects the feeds of some queues, or of all that the engine has. Engine and ledger are its own, and open."""

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger,
        queues: Sequence[str] = (),
        *,
        name: str = "",
        forked: Callable[[str], None] | None = None,
        lease_ms: int = LEASE_MS,
        linger_s: float = LINGER_S,
        round_s: float = _ROUND_S,
    ) -> None:
        """`forked` is told the queue of a feed that has forked: jobs may be lost, the reconciler knows."""
        assert ledger.projection is not None
        self.name = name or new_identity()
        self._engine = engine
        self._ledger = ledger
        self._projection = ledger.projection
        self._queues = QueueSelection(engine, queues)
        self._letters = DeadLetterConfirmer(engine, ledger)
        self._forked = forked
        self._lease_ms = lease_ms
        self._linger_s = linger_s
        self._round_s = round_s
        self._tracks: dict[str, FeedCursor] = {}
        self._troubles: dict[str, FeedFailure] = {}
        #: Feeds that others project, and when to look at them again.
        self._others: set[str] = set()
        self._others_at = 0.0
        #: Since when, by the wall clock in ms, a queue has something that is not in the ledger.
        self._behind: dict[str, int] = {}
        self._lags: list[int] = []
        self._round_at = 0.0
        self._anew = True

    @property
    def counts(self) -> Counters:
        """`projected`, `anomalies`, `forks`, `feed_lag_ms`: what happened in this process."""
        return self._engine.counts

    @property
    def lag_ms(self) -> int:
        """How old the oldest event is that is not in the ledger, or was when it got there in the last turn."""
        return self.counts.feed_lag_ms

    async def run(self) -> None:
        """Project until cancelled; then give the feeds back, so that another one goes on at once."""
        backoff, complaint = Backoff(), LogThrottle(_log)
        #: Where each feed was, last time.
        positions: dict[str, str] = {}
        try:
            while True:
                try:
                    await self._turn()
                    backoff.reset()
                    if complaint.reset():
                        _log.info("the projector works again")
                    raise_if_cancelled()
                    continue
                except Unavailable as exc:
                    complaint.log(logging.WARNING, "the projector waits: %s", exc)
                except HoldfastError as exc:
                    complaint.log(logging.ERROR, "the projector cannot work: %s", exc)
                except Exception:  # noqa: BLE001 - top of a loop
                    _log.exception("projecting failed in an unexpected way, trying again")
                raise_if_cancelled()
                positions = {queue: track.at.position for queue, track in self._tracks.items()} | positions
                await self._let_go()
                await self._see_what_waits(positions)
                await asyncio.sleep(backoff.next_s())
        finally:
            await self._give_back()

    # A turn ----------------------------------------------------------------------------------------

    async def _turn(self) -> None:
        """A batch of each feed that has one, or a wait for the first."""
        self._lags = []
        if time.monotonic() >= self._round_at:
            await self._go_round()
        busy = [track for track in self._tracks.values() if track.ahead is not None]
        # Redis looks at the time ten times a second: a short wait for idle feeds would cost busy ones 100 ms.
        wait_ms = 0 if busy else max(1, round((self._round_at - time.monotonic()) * 1000))
        await self._serve(busy + await self._wait(wait_ms))
        self._measure()

    async def _serve(self, tracks: Iterable[FeedCursor]) -> None:
        """Read them all, wait once for company, write them all; first those that somebody waits for."""
        for track in tracks:
            await self._attempt(track, self._collect)
        await self._linger()
        due = [(track.pending.urgent, track) for track in self._tracks.values() if track.pending is not None]
        for _, track in sorted(due, key=lambda pair: not pair[0]):
            await self._attempt(track, self._write)

    async def _go_round(self) -> None:
        """Take feeds that nobody projects, keep ours, and see whether idle ones are still what they were."""
        names = await self._names()
        await self._take_free(names)
        now = time.monotonic()
        for track in list(self._tracks.values()):
            if track.leased_until - now < self._lease_ms / 2000:
                await self._attempt(track, self._keep)
        idle = [track for track in self._tracks.values() if track.ahead is None]
        await self._serve([track for track in idle if now - track.looked_at >= self._round_s])
        for track in list(self._tracks.values()):
            if track.tell_at and now >= track.tell_at:
                self._tell(track)
            if now >= track.strays_at:
                await self._attempt(track, self._see_to_strays)
            await self._attempt(track, self._trim_idle)
        self._round_at = time.monotonic() + self._round_s

    async def _names(self) -> set[str]:
        # Those that could not be projected, too: an engine that was wiped lists none before it is admitted.
        names = {*await self._queues.names(), *self._troubles}
        if self._anew:
            await self._ledger.open()
            if not self._queues.is_explicit:
                # An engine that was wiped has forgotten its queues, the ledger has not.
                names |= set(await self._ledger.recovery.queues())
            self._anew = False
        return names

    async def _take_free(self, names: Iterable[str]) -> None:
        """Those that are not ours, as far as it is time to look at them: one question for all of them."""
        now = time.monotonic()
        if now >= self._others_at:
            self._others.clear()
            self._others_at = now + min(self._lease_ms / 2000, _STAND_BY_S) * uniform(0.5, 1.0)
        wanted = [queue for queue in names if queue not in self._tracks and queue not in self._others]
        wanted = [queue for queue in wanted if queue not in self._troubles or now >= self._troubles[queue].until]
        if not wanted:
            return
        self._others |= await self._projection.held_by_others(wanted, self.name)
        for queue in self._others:
            # Theirs to tell.
            self._behind.pop(queue, None)
        for queue in wanted:
            if queue not in self._others:
                try:
                    await self._take(queue)
                except Exception as exc:  # noqa: BLE001 - the other queues go on
                    await self._stumble(queue, exc)

    async def _take(self, queue: str) -> None:
        at = await self._projection.acquire(queue, self.name, self._lease_ms)
        if at is None:
            self._others.add(queue)
            return
        _log.info("projecting queue %s from %s", queue, at.position or "its start")
        trouble = self._troubles.get(queue)
        track = self._tracks[queue] = FeedCursor(queue, at, trouble.share if trouble else 1.0)
        self._leased(track)
        if not at.position:
            # Its first reader. A feed that has our position has our registration, too.
            await reopen_intake(self._engine, self._ledger, queue, insist=True)
        self._tell(track)

    async def _keep(self, track: FeedCursor) -> None:
        at = await self._projection.acquire(track.queue, self.name, self._lease_ms)
        if at is None:
            _log.info("another projector has taken queue %s", track.queue)
            self._drop(track)
        elif at != track.at:
            self._restart(track, at)
        else:
            self._leased(track)

    async def _wait(self, wait_ms: int) -> list[FeedCursor]:
        """Feeds with something to read that nobody reads yet."""
        positions = {
            queue: track.pending.batch[-1].position if track.pending else track.at.position
            for queue, track in self._tracks.items()
            if track.ahead is None
        }
        if not positions:
            await asyncio.sleep(0 if self._tracks else wait_ms / 1000)
            return []
        try:
            ready = await self._engine.wait_feed(positions, wait_ms)
        except Exception:  # noqa: BLE001 - it may be the fault of one of them
            # Raises if the engine is down. Else one feed that cannot be read spoils the wait for all: look at each.
            await self._engine.now_ms()
            await asyncio.sleep(self._linger_s)
            ready = list(positions)
        return [self._tracks[queue] for queue in ready if queue in self._tracks]

    async def _attempt(self, track: FeedCursor, step: Callable[[FeedCursor], Awaitable[None]]) -> None:
        """One step for one queue; what goes wrong is its trouble alone, unless engine or ledger are down."""
        if self._tracks.get(track.queue) is not track:
            return
        try:
            await step(track)
        except FeedForked:
            await self._attempt(track, self._go_astray)
        except PositionMoved:
            _log.info("another projector was faster with queue %s", track.queue)
            self._drop(track)
        except Exception as exc:  # noqa: BLE001 - the other queues go on
            await self._stumble(track.queue, exc)

    async def _stumble(self, queue: str, error: Exception) -> None:
        """Let this queue go for a while. Raises if it is not its fault."""
        trouble = self._troubles.setdefault(queue, FeedFailure())
        track = self._tracks.get(queue)
        if track is not None and isinstance(error, LedgerUnavailable):
            trouble.share = max(SMALLEST_SHARE, track.share / 2)
        if isinstance(error, Unavailable):
            await self._projection.position(queue)
            await self._engine.now_ms()
        if track is not None:
            self._drop(track, keep_lag=True)
        self._behind.setdefault(queue, _now_ms())
        trouble.again()
        level = logging.WARNING if isinstance(error, Unavailable) else logging.ERROR
        unexpected = None if isinstance(error, HoldfastError) else error
        trouble.complaint.log(level, "queue %s cannot be projected, trying again: %s", queue, error, cause=unexpected)

    def _is_well(self, track: FeedCursor) -> None:
        if self._troubles.pop(track.queue, None) is not None:
            _log.info("queue %s is projected again", track.queue)

    # A batch ---------------------------------------------------------------------------------------

    async def _collect(self, track: FeedCursor) -> None:
        """Read what is to be written next, if there is anything."""
        track.looked_at = time.monotonic()
        if track.astray:
            await self._find_place(track)
            return
        if track.ahead is None:
            following = track.next_batch(await track.read(self._engine, track.at.position, track.at.nonce))
        else:
            following = await track.ahead
            track.ahead = None
        if following.batch:
            track.pending = following
            self._behind[track.queue] = _oldest_ms(following.batch) or _now_ms()
        else:
            self._behind.pop(track.queue, None)
            self._is_well(track)

    async def _linger(self) -> None:
        """Wait a little for company, once for all feeds, unless one has enough or is in a hurry."""
        until = time.monotonic() + self._linger_s
        while pending := [track.pending for track in self._tracks.values() if track.pending is not None]:
            left_s = until - time.monotonic()
            if left_s <= 0 or any(following.is_enough for following in pending):
                return
            ready = await self._wait(max(1, round(left_s * 1000)))
            if not ready:
                return
            await asyncio.sleep(max(0.0, min(_LOOK_S, until - time.monotonic())))
            for track in ready:
                await self._attempt(track, self._collect_more)

    async def _collect_more(self, track: FeedCursor) -> None:
        if track.pending is None:
            await self._collect(track)
            return
        last = track.pending.batch[-1]
        track.pending = track.next_batch(
            track.pending.batch + await track.read(self._engine, last.position, last.nonce)
        )

    async def _write(self, track: FeedCursor) -> None:
        """Write the next batch of a feed, while what comes after it is being read."""
        following, track.pending = track.pending, None
        assert following is not None
        batch, rest = following.batch, following.rest
        if following.is_enough:
            # There is a backlog: read on while the ledger writes.
            track.ahead = asyncio.create_task(self._read_on(track, rest, (rest or batch)[-1]))
        try:
            done = await self._projection.project(
                track.queue, self.name, self._lease_ms, track.at, batch, following.prepared
            )
        except BaseException:
            track.drop_ahead()
            raise
        self._written(track, batch, done)
        await self._trim(track)

    async def _read_on(self, track: FeedCursor, rest: list[FeedEntry], last: FeedEntry) -> PendingBatch:
        if not is_enough(rest) and not track.next_batch(rest).rest:
            rest = rest + await track.read(self._engine, last.position, last.nonce)
        following = track.next_batch(rest)
        if not following.is_enough:
            return following
        return PendingBatch(following.batch, following.rest, self._projection.prepare(track.queue, following.batch))

    def _written(self, track: FeedCursor, batch: list[FeedEntry], done: ProjectionResult) -> None:
        track.at = done.at
        self._leased(track)
        counts = self.counts
        counts.projected += done.events
        counts.anomalies += done.anomalies
        counts.slow_batches += done.slow_path
        track.share = min(1.0, track.share * 2)
        self._is_well(track)
        if oldest_ms := _oldest_ms(batch):
            self._lags.append(_now_ms() - oldest_ms)
        self._behind.pop(track.queue, None)
        for entry in batch:
            if entry.error:
                counts.anomalies += 1
                _log.error("entry %s of queue %s's feed is skipped: %s", entry.position, track.queue, entry.error)
        if done.anomalies:
            _log.warning("%d events of queue %s did not fit the ledger's story", done.anomalies, track.queue)
        if done.dead_letters:
            self._tell(track)

    # Forks -----------------------------------------------------------------------------------------

    async def _go_astray(self, track: FeedCursor) -> None:
        """The feed is another one than the position's."""
        if await self._projection.position(track.queue) != track.at:
            # It is not: while we were stopped, another one went on, and has trimmed what we look for.
            raise PositionMoved(track.queue)
        track.drop_ahead()
        # Before the position moves: a feed that has been read counts as one whose keys are known.
        await reopen_intake(self._engine, self._ledger, track.queue, insist=True)
        track.astray = True
        self.counts.forks += 1
        _log.error(
            "the feed of queue %s has forked: it does not have the entry %s that the ledger read last; Redis was "
            "wiped, or an older copy of it took over; reading it again from its start",
            track.queue,
            track.at.position,
        )
        # Jobs may wait again for answers that the engine had been told. Before the position moves, which ends the fork.
        await self._ledger.operators.mark_undelivered(track.queue, _FORGOTTEN_MS)
        track.strays_at = 0.0
        if self._forked is not None:
            self._forked(track.queue)

    async def _find_place(self, track: FeedCursor) -> None:
        """From the feed's start, past what the ledger has of it, until the position is in this feed.

        What it has is a beginning of the feed: two feeds that part never meet again.
        """
        last = FeedEntry("", "", [])
        while entries := await track.read(self._engine, last.position, last.nonce):
            known = await self._projection.already_written(track.queue, entries)
            if fresh := [entry for entry in entries if entry.position not in known]:
                # If it cannot be written, the track is dropped, and who takes the feed next goes astray again.
                track.pending = track.next_batch(fresh)
                self._behind[track.queue] = _oldest_ms(fresh) or _now_ms()
                track.astray = False
                return
            last = entries[-1]
        # Nothing new yet. The position is moved all the same, so that everybody sees that this feed is being read.
        if track.at != FeedPosition(last.position, last.nonce):
            await self._write_all(track, [FeedEntry(last.position, last.nonce, [])])
        track.astray = not last.position

    async def _write_all(self, track: FeedCursor, entries: list[FeedEntry]) -> None:
        while entries:
            following = track.next_batch(entries)
            batch, entries = following.batch, following.rest
            done = await self._projection.project(track.queue, self.name, self._lease_ms, track.at, batch)
            self._written(track, batch, done)

    # Beside ----------------------------------------------------------------------------------------

    async def _trim_idle(self, track: FeedCursor) -> None:
        await self._trim(track, idle=True)

    async def _trim(self, track: FeedCursor, *, idle: bool = False) -> None:
        """Drop what the ledger has; never the entry at the position, which tells one feed from another."""
        now = time.monotonic()
        position = track.at.position
        if track.astray or position == track.trimmed_to or (not idle and now - track.trimmed_at < _TRIM_S):
            return
        await self._engine.trim_feed(track.queue, position)
        track.trimmed_to, track.trimmed_at = position, now

    def _tell(self, track: FeedCursor) -> None:
        if track.telling is not None and not track.telling.done():
            # Once more when this round is over.
            track.tell_at = time.monotonic()
            return
        track.tell_at = 0.0
        track.telling = asyncio.create_task(self._tell_engine(track))

    async def _tell_engine(self, track: FeedCursor) -> None:
        try:
            left = await self._letters.confirm_all(track.queue)
        except HoldfastError as exc:
            _log.info("dead letters of queue %s are told later: %s", track.queue, exc)
            left = 1
        except Exception:  # noqa: BLE001 - a task of its own
            _log.exception("telling the engine of dead letters failed in an unexpected way, trying again")
            left = 1
        if left:
            track.tell_at = time.monotonic() + _LETTERS_S

    async def _see_to_strays(self, track: FeedCursor) -> None:
        """Jobs that wait for the ledger, which has nothing to tell them: one of the two was replaced, or set back."""
        track.defer_orphan_check(soon=False)
        if not track.at.position:
            return
        events = await self._letters.find_orphans(track.queue, track.at)
        track.defer_orphan_check(soon=self._letters.has_waiting(track.queue))
        if events:
            # Fenced by the position like any other batch, which stays where it is.
            await self._write_all(track, [FeedEntry(track.at.position, track.at.nonce, events)])

    def _leased(self, track: FeedCursor) -> None:
        track.leased_until = time.monotonic() + self._lease_ms / 1000

    def _restart(self, track: FeedCursor, at: FeedPosition) -> None:
        """The position is not where we left it: go on from there."""
        track.drop_ahead()
        track.at, track.astray = at, not at.position

    def _drop(self, track: FeedCursor, *, keep_lag: bool = False) -> None:
        track.drop_ahead()
        if not keep_lag:
            self._behind.pop(track.queue, None)
        self._tracks.pop(track.queue, None)
        self._round_at = min(self._round_at, time.monotonic() + self._round_s)

    async def _let_go(self) -> None:
        """After a failure nothing is certain; the feeds are taken anew, from where the ledger says they are."""
        for track in list(self._tracks.values()):
            track.drop_ahead()
            if track.telling is not None:
                track.telling.cancel()
        self._tracks.clear()
        self._round_at = 0.0
        self._anew = True

    async def _give_back(self) -> None:
        queues = list(self._tracks)
        tasks = [track.telling for track in self._tracks.values() if track.telling is not None]
        await self._let_go()
        try:
            async with asyncio.timeout(_GIVE_BACK_S):
                await asyncio.gather(*tasks, return_exceptions=True)
                for queue in queues:
                    await self._projection.release(queue, self.name)
        except (TimeoutError, HoldfastError) as exc:
            _log.info("queues could not be given back, others take them when the leases are over: %r", exc)

    # How far behind --------------------------------------------------------------------------------

    def _measure(self) -> None:
        now_ms = _now_ms()
        lags = [now_ms - since_ms for since_ms in self._behind.values()]
        self.counts.feed_lag_ms = max(0, *self._lags, *lags, 0)

    async def _see_what_waits(self, positions: dict[str, str]) -> None:
        """While nothing can be written: which feeds have grown since."""
        try:
            for queue in await self._engine.wait_feed(positions, 0):
                self._behind.setdefault(queue, _now_ms())
        except HoldfastError as exc:
            _log.debug("nor can the feeds be looked at: %s", exc)
        self._measure()


def _oldest_ms(entries: Iterable[FeedEntry]) -> int:
    """0: they tell of nothing."""
    return next((entry.events[0].at_ms for entry in entries if entry.events), 0)


def _now_ms() -> int:
    return round(time.time() * 1000)
