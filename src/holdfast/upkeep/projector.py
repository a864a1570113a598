"""Feed → ledger, exactly once (rules 14–18).

One projector works on a feed at a time, by a lease in the ledger that only saves work: rows and position are one
transaction, fenced by the old position, so that two at once do no harm. What happens if it dies here?

    read ─────► commit ─────► trim
         1             2           3

1. nothing is written: the next one reads the same entries. 2. they are written, and the position says so: the next
one goes on behind them, and trims. 3. nothing is left to do. A commit of unknown outcome is 1 or 2: the position knows.

Every read begins at the entry that the position names and looks at its nonce. If it is not there the feed has forked
(Redis was wiped, or a stale replica took over): then the feed is read from its start, without what is written already.

The ledger being down costs nothing but time: the feed waits in the engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from holdfast.core.backoff import Backoff
from holdfast.engine.port import Engine, FeedEntry
from holdfast.errors import HoldfastError, Unavailable
from holdfast.ledger.port import Ledger, Position, PositionMoved, Projected
from holdfast.observe.counts import Counts
from holdfast.upkeep.admission import admit
from holdfast.upkeep.dead_letters import DeadLetters
from holdfast.upkeep.loop import Queues

_log: Final = logging.getLogger("holdfast.projector")

LEASE_MS: Final = 5_000
#: A batch waits this long for company, unless it is this large or in a hurry …
LINGER_S: Final = 0.05
ENOUGH_EVENTS: Final = 3_000
#: … and takes no more than this into one transaction when there is a backlog.
MOST_EVENTS: Final = 10_000
#: While it lingers, it looks for more this often.
_LOOK_S: Final = 0.005

#: Entries read at a time: one holds up to some 500 events, most of them far fewer.
_FIRST_READ: Final = 20
_MOST_READ: Final = 500

#: How often to look for new queues, for feeds that lost their projector, and whether an idle feed is still the same.
_ROUND_S: Final = 1.0
_TRIM_S: Final = 1.0
#: Dead letters that could not be told are tried again after this.
_LETTERS_S: Final = 5.0


class Fork(Exception):
    """The feed is not the one that the position is in."""


@dataclass(frozen=True, slots=True)
class Next:
    """A batch to be written, what comes after it, and what the store has made of the batch in advance."""

    batch: list[FeedEntry]
    rest: list[FeedEntry]
    prepared: Any = None


class Track:
    """One feed, as this projector follows it while it has the lease."""

    def __init__(self, queue: str, at: Position) -> None:
        self.queue = queue
        #: Where the ledger is.
        self.at = at
        #: The position is not known to be in this feed: it is new, or has forked.
        self.astray = not at.position
        self.looked_at = 0.0
        self.trimmed_at = 0.0
        self.trimmed_to = ""
        self.leased_until = 0.0
        self.ahead: asyncio.Task[Next] | None = None
        self.telling: asyncio.Task[None] | None = None
        self.tell_at = 0.0

    def drop_ahead(self) -> None:
        if self.ahead is not None:
            self.ahead.cancel()
            self.ahead.add_done_callback(_look_at)
            self.ahead = None


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
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
        self._engine = engine
        self._ledger = ledger
        self._projection = ledger.projection
        self._queues = Queues(engine, queues)
        self._letters = DeadLetters(engine, ledger)
        self._forked = forked
        self._lease_ms = lease_ms
        self._linger_s = linger_s
        self._round_s = round_s
        self._tracks: dict[str, Track] = {}
        self._round_at = 0.0
        self._anew = True

    @property
    def counts(self) -> Counts:
        """`projected`, `anomalies`, `forks`, `feed_lag_ms`: what happened in this process."""
        return self._engine.counts

    @property
    def lag_ms(self) -> int:
        """How old the newest event was when it reached the ledger, last time."""
        return self.counts.feed_lag_ms

    async def run(self) -> None:
        """Project until cancelled; then give the feeds back, so that another one goes on at once."""
        backoff = Backoff()
        try:
            while True:
                try:
                    await self._turn()
                    backoff.reset()
                    continue
                except Unavailable as exc:
                    _log.info("the projector waits: %s", exc)
                except HoldfastError as exc:
                    _log.error("the projector cannot work: %s", exc)
                except Exception:  # noqa: BLE001 - top of a loop
                    _log.exception("projecting failed in an unexpected way, trying again")
                await self._let_go()
                await asyncio.sleep(backoff.next_s())
        finally:
            await self._give_back()

    # A turn ----------------------------------------------------------------------------------------

    async def _turn(self) -> None:
        """A batch of each feed that has one, or a wait for the first."""
        if time.monotonic() >= self._round_at:
            await self._go_round()
        busy = [track for track in self._tracks.values() if track.ahead is not None]
        wait_ms = 1 if busy else max(1, round((self._round_at - time.monotonic()) * 1000))
        for track in busy + await self._wait(wait_ms):
            await self._follow(track)

    async def _go_round(self) -> None:
        """Take feeds that nobody projects, keep ours, and see whether idle ones are still what they were."""
        for queue in await self._names():
            track = self._tracks.get(queue)
            if track is None:
                at = await self._projection.take(queue, self.name, self._lease_ms)
                if at is not None:
                    await self._begin(queue, at)
            elif track.leased_until - time.monotonic() < self._lease_ms / 2000:
                await self._keep(track)
        now = time.monotonic()
        for track in list(self._tracks.values()):
            if track.ahead is None and now - track.looked_at >= self._round_s:
                await self._follow(track)
            if track.tell_at and now >= track.tell_at:
                self._tell(track)
            await self._trim(track, idle=True)
        self._round_at = time.monotonic() + self._round_s

    async def _names(self) -> set[str]:
        names = set(await self._queues.now())
        if self._anew:
            await self._ledger.open()
            if not self._queues.named:
                # An engine that was wiped has forgotten its queues, the ledger has not.
                names |= set(await self._ledger.recovery.queues())
            self._anew = False
        return names

    async def _begin(self, queue: str, at: Position) -> None:
        _log.info("projecting queue %s from %s", queue, at.position or "its start")
        track = self._tracks[queue] = Track(queue, at)
        self._leased(track)
        if not at.position:
            # Its first reader. A feed that has our position has our registration, too.
            await admit(self._engine, self._ledger, queue)
        self._tell(track)
        await self._follow(track)

    async def _keep(self, track: Track) -> None:
        at = await self._projection.take(track.queue, self.name, self._lease_ms)
        if at is None:
            _log.info("another projector has taken queue %s", track.queue)
            self._drop(track)
        elif at != track.at:
            self._restart(track, at)
        else:
            self._leased(track)

    async def _wait(self, wait_ms: int) -> list[Track]:
        """Feeds with something to read that nobody reads yet."""
        positions = {queue: track.at.position for queue, track in self._tracks.items() if track.ahead is None}
        if not positions:
            await asyncio.sleep(0 if self._tracks else wait_ms / 1000)
            return []
        ready = await self._engine.wait_feed(positions, wait_ms)
        return [self._tracks[queue] for queue in ready if queue in self._tracks]

    # A batch ---------------------------------------------------------------------------------------

    async def _follow(self, track: Track) -> None:
        """Write the next batch of a feed, while what comes after it is being read."""
        track.looked_at = time.monotonic()
        try:
            if track.astray:
                await self._find_place(track)
            elif (following := await self._gather(track)) is not None:
                await self._write(track, following)
        except Fork:
            await self._go_astray(track)
        except PositionMoved:
            _log.info("another projector was faster with queue %s", track.queue)
            self._drop(track)

    async def _gather(self, track: Track) -> Next | None:
        """What is to be written next, if there is anything. Waits a little for company."""
        if track.ahead is None:
            entries = await self._read(track, track.at.position, track.at.nonce)
        else:
            following = await track.ahead
            track.ahead = None
            if _is_enough(following.batch):
                return following
            entries = following.batch + following.rest
        until = time.monotonic() + self._linger_s
        while entries and not _is_enough(entries):
            left_s = until - time.monotonic()
            if left_s <= 0 or not await self._engine.wait_feed(
                {track.queue: entries[-1].position}, max(1, round(left_s * 1000))
            ):
                break
            await asyncio.sleep(max(0.0, min(_LOOK_S, until - time.monotonic())))
            entries += await self._read(track, entries[-1].position, entries[-1].nonce)
        return Next(*_cut(entries)) if entries else None

    async def _read(self, track: Track, start: str, nonce: str) -> list[FeedEntry]:
        """Entries after `start`, which must still be there. Raises `Fork`."""
        entries: list[FeedEntry] = []
        events, limit = 0, _FIRST_READ
        while events < MOST_EVENTS:
            page = await self._engine.feed(track.queue, start, limit)
            if start:
                if not page or (page[0].position, page[0].nonce) != (start, nonce):
                    raise Fork(track.queue)
                del page[0]
            if not page:
                break
            entries += page
            events = sum(len(entry.events) for entry in entries)
            start, nonce = entries[-1].position, entries[-1].nonce
            if len(page) < limit - 1:
                break
            wanted = max(0, MOST_EVENTS - events) * len(entries) // max(1, events)
            limit = min(_MOST_READ, wanted + 2)
        return entries

    async def _write(self, track: Track, following: Next) -> None:
        batch, rest = following.batch, following.rest
        if rest or _is_enough(batch):
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

    async def _read_on(self, track: Track, rest: list[FeedEntry], last: FeedEntry) -> Next:
        if sum(len(entry.events) for entry in rest) < ENOUGH_EVENTS:
            rest = rest + await self._read(track, last.position, last.nonce)
        batch, after = _cut(rest)
        prepared = self._projection.prepare(track.queue, batch) if _is_enough(batch) else None
        return Next(batch, after, prepared)

    def _written(self, track: Track, batch: list[FeedEntry], done: Projected) -> None:
        track.at = done.at
        self._leased(track)
        counts = self.counts
        counts.projected += done.events
        counts.anomalies += done.anomalies
        counts.looked_up += done.looked_up
        newest_ms = max((entry.events[-1].at_ms for entry in batch if entry.events), default=0)
        if newest_ms:
            counts.feed_lag_ms = max(0, round(time.time() * 1000) - newest_ms)
        if done.anomalies:
            _log.warning("%d events of queue %s did not fit the ledger's story", done.anomalies, track.queue)
        if done.dead_letters:
            self._tell(track)

    # Forks -----------------------------------------------------------------------------------------

    async def _go_astray(self, track: Track) -> None:
        """The feed is another one than the position's."""
        track.drop_ahead()
        track.astray = True
        self.counts.forks += 1
        _log.error(
            "the feed of queue %s has forked: it does not have the entry %s that the ledger read last; Redis was "
            "wiped, or an older copy of it took over; reading it again from its start",
            track.queue,
            track.at.position,
        )
        await admit(self._engine, self._ledger, track.queue)
        if self._forked is not None:
            self._forked(track.queue)

    async def _find_place(self, track: Track) -> None:
        """From the feed's start, past what the ledger has of it, until the position is in this feed.

        What it has is a beginning of the feed: two feeds that part never meet again.
        """
        last = FeedEntry("", "", [])
        while entries := await self._read(track, last.position, last.nonce):
            known = await self._projection.written(track.queue, entries)
            if fresh := [entry for entry in entries if entry.position not in known]:
                await self._write_all(track, fresh)
                track.astray = False
                return
            last = entries[-1]
        # Nothing new yet. The position is moved all the same, so that everybody sees that this feed is being read.
        if track.at != Position(last.position, last.nonce):
            await self._write_all(track, [FeedEntry(last.position, last.nonce, [])])
        track.astray = not last.position

    async def _write_all(self, track: Track, entries: list[FeedEntry]) -> None:
        while entries:
            batch, entries = _cut(entries)
            done = await self._projection.project(track.queue, self.name, self._lease_ms, track.at, batch)
            self._written(track, batch, done)

    # Beside ----------------------------------------------------------------------------------------

    async def _trim(self, track: Track, *, idle: bool = False) -> None:
        """Drop what the ledger has; never the entry at the position, which tells one feed from another."""
        now = time.monotonic()
        position = track.at.position
        if track.astray or position == track.trimmed_to or (not idle and now - track.trimmed_at < _TRIM_S):
            return
        await self._engine.forget(track.queue, position)
        track.trimmed_to, track.trimmed_at = position, now

    def _tell(self, track: Track) -> None:
        if track.telling is not None and not track.telling.done():
            # Once more when this round is over.
            track.tell_at = time.monotonic()
            return
        track.tell_at = 0.0
        track.telling = asyncio.create_task(self._tell_engine(track))

    async def _tell_engine(self, track: Track) -> None:
        try:
            left = await self._letters.send(track.queue)
        except HoldfastError as exc:
            _log.info("dead letters of queue %s are told later: %s", track.queue, exc)
            left = 1
        except Exception:  # noqa: BLE001 - a task of its own
            _log.exception("telling the engine of dead letters failed in an unexpected way, trying again")
            left = 1
        if left:
            track.tell_at = time.monotonic() + _LETTERS_S

    def _leased(self, track: Track) -> None:
        track.leased_until = time.monotonic() + self._lease_ms / 1000

    def _restart(self, track: Track, at: Position) -> None:
        """The position is not where we left it: go on from there."""
        track.drop_ahead()
        track.at, track.astray = at, not at.position

    def _drop(self, track: Track) -> None:
        track.drop_ahead()
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
        await asyncio.gather(*tasks, return_exceptions=True)
        for queue in queues:
            try:
                await self._projection.release(queue, self.name)
            except HoldfastError as exc:
                _log.info("queue %s could not be given back, another takes it when the lease is over: %s", queue, exc)
                return


def _look_at(task: asyncio.Task[Next]) -> None:
    """Nobody wants its result any more, nor its error."""
    if not task.cancelled():
        task.exception()


def _is_enough(entries: Sequence[FeedEntry]) -> bool:
    return sum(len(entry.events) for entry in entries) >= ENOUGH_EVENTS or any(entry.hurry for entry in entries)


def _cut(entries: list[FeedEntry]) -> tuple[list[FeedEntry], list[FeedEntry]]:
    """As many as go into one transaction, and the rest."""
    events = 0
    for place, entry in enumerate(entries):
        events += len(entry.events)
        if events > MOST_EVENTS and place:
            return entries[:place], entries[place:]
    return entries, []
