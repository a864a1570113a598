"""Gets jobs: claims while there is room, takes over lost leases, comes back after every failure.

One loop does all three, one after the other, so that no lease can reach the runner twice: after a lost
reply `engine.resume` is asked for what the engine says we hold, while no other claim is on its way.

Room is `concurrency` and a little more: what will be done within 10 ms, and while a claim is on its way, at
the rate measured just now. For slow tasks that is nothing, for no-ops a few hundred, and nobody has to tune it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from random import Random
from typing import Final

from holdfast.aio import raise_if_cancelled
from holdfast.core.job import MAX_BATCH, Claim, Lease
from holdfast.core.retry import Backoff
from holdfast.engine.port import Engine
from holdfast.errors import EngineUnavailable
from holdfast.settings import Settings
from holdfast.worker.in_flight import InFlight
from holdfast.worker.runner import Runner

_log: Final = logging.getLogger("holdfast.worker")

#: A claim waits on the server this long at most; short enough to notice a store that has gone quiet.
_WAIT_S: Final = 5.0
#: The loop ticks at least this often; readiness is judged by it.
_TICK_S: Final = 1.0
#: A worker whose loop has not ticked for so long is not ready.
_STALE_S: Final = 10.0

_AHEAD_S: Final = 0.010
_RATE_SPAN_S: Final = 0.020
#: A store that is slower than this gets no more claimed ahead for it.
_MAX_CLAIM_S: Final = 0.050
#: Even with an interval of 0 the engine is not asked more often than this.
_MIN_RECLAIM_S: Final = 0.02


class Fetcher:
    """Keeps the runner supplied. One event loop."""

    def __init__(
        self,
        engine: Engine,
        worker: str,
        queues: Sequence[str],
        runner: Runner,
        held: InFlight,
        settings: Settings,
        *,
        quota: int | None = None,
        random: Random | None = None,
    ) -> None:
        self._engine = engine
        self._worker = worker
        self._queues = tuple(queues)
        self._runner = runner
        self._held = held
        self._settings = settings
        #: Jobs it may take in all; None is no limit.
        self._quota = quota
        self._random = random or Random()
        self._backoff = Backoff(self._random)
        self._rate = Throughput()
        self._room = asyncio.Event()
        self._ticked_at = -math.inf
        self._reclaim_at = 0.0
        runner.wake = self._room.set

    @property
    def ready(self) -> bool:
        """Whether the loop ticked lately and the engine answered."""
        return self._backoff.failures == 0 and time.monotonic() - self._ticked_at < _STALE_S

    @property
    def is_new(self) -> bool:
        """Whether it has yet to tick for the first time."""
        return self._ticked_at == -math.inf and self._backoff.failures == 0

    async def run(self) -> None:
        """Fetch until cancelled. Never ends by itself."""
        while True:
            raise_if_cancelled()
            try:
                await self._turn()
            except EngineUnavailable as exc:
                _log.warning("the engine does not answer, trying again: %s", exc)
                await self._recover()
            except Exception:  # noqa: BLE001 - top of a loop
                _log.exception("fetching failed in an unexpected way, trying again")
                await self._recover()

    async def reclaim(self) -> int:
        """Take over lost leases now, as far as there is room."""
        limit = min(self._space(), self._settings.reclaim_batch)
        if limit <= 0:
            return 0
        try:
            claims = await self._engine.reclaim(self._worker, self._queues, limit)
        except EngineUnavailable:
            self._engine.counts.reclaim_errors += 1
            raise
        if claims:
            self._take(claims)
        return len(claims)

    async def recover_claims(self) -> None:
        """Find leases whose reply was lost: the engine says they are ours, and we do not have them."""
        claims = await self._engine.recover_claims(self._worker, self._queues, self._leases())
        if claims:
            _log.info("%d claims found whose reply was lost", len(claims))
            # These may be from before an outage: they can set the clock, but not set it back.
            if (claimed_at_ms := max(claim.claimed_at_ms for claim in claims)) > self._runner.now_ms():
                self._runner.set_engine_time(claimed_at_ms)
            self._runner.accept(claims)

    def stop_prefetching(self) -> None:
        """What was fetched ahead is not being run: fetch nothing ahead for now."""
        self._rate.reset()

    async def _turn(self) -> None:
        limit = await self._wait_for_room()
        now = time.monotonic()
        if self._settings.reclaim and now >= self._reclaim_at:
            self._reclaim_at = now + self._reclaim_pause()
            await self.reclaim()
            limit = self._space()
        self._ticked_at = time.monotonic()
        if limit > 0:
            began = time.monotonic()
            claims = await self._engine.claim(self._worker, self._queues, limit, self._wait_ms(), self._leases)
            if claims:
                if len(claims) == limit:
                    # A full batch did not wait for jobs: that is what the way to the store and back takes.
                    self._rate.record_claim(time.monotonic() - began)
                self._take(claims)
                if len(claims) < limit:
                    # Nothing more waits: let these start before the next claim is put together.
                    await asyncio.sleep(0)

    async def _wait_for_room(self) -> int:
        """How many to claim. While many are done per millisecond, wait for a batch worth the call."""
        runner = self._runner
        while True:
            ahead = self._rate.prefetch(runner.finished)
            capacity = runner.concurrency + ahead
            worthwhile = max(1, min(ahead, capacity // 4, self._left()))
            if (space := min(capacity - runner.load, self._left())) >= worthwhile:
                return min(space, MAX_BATCH)
            self._room.clear()
            runner.wake_at = capacity - worthwhile
            try:
                async with asyncio.timeout(_TICK_S):
                    await self._room.wait()
            except TimeoutError:
                self._ticked_at = time.monotonic()
            finally:
                runner.wake_at = -1

    def _leases(self) -> set[Lease]:
        """That we know of."""
        return {run.claim.lease for run in self._held}

    def _space(self) -> int:
        return min(self._runner.concurrency - self._runner.load, self._left(), MAX_BATCH)

    def _left(self) -> int:
        # Not what was claimed: jobs that were given back, or lost in line, were not done here.
        return MAX_BATCH if self._quota is None else self._quota - self._runner.finished - self._runner.load

    def _take(self, claims: list[Claim]) -> None:
        # Their time of claim is the engine's clock of a moment ago.
        self._runner.set_engine_time(claims[-1].claimed_at_ms)
        self._runner.accept(claims)

    def _wait_ms(self) -> int:
        if not self._settings.reclaim:
            return round(_WAIT_S * 1000)
        left_s = max(_MIN_RECLAIM_S, self._reclaim_at - time.monotonic())
        return round(min(_WAIT_S, left_s) * 1000)

    def _reclaim_pause(self) -> float:
        """Never longer than the interval: it is what a lost lease waits at most. Uneven, so that workers take turns."""
        interval_s = max(_MIN_RECLAIM_S, self._settings.reclaim_interval_s)
        return interval_s * self._random.uniform(0.6, 1.0)

    async def _recover(self) -> None:
        """Wait and try until the engine answers; then start what its lost replies had given us."""
        while True:
            raise_if_cancelled()
            await asyncio.sleep(self._backoff.next_s())
            try:
                await self.recover_claims()
            except EngineUnavailable as exc:
                _log.info("the engine still does not answer: %s", exc)
            except Exception:  # noqa: BLE001 - top of a loop
                _log.exception("recovering failed in an unexpected way, trying again")
            else:
                self._backoff.reset()
                self._engine.counts.reconnects += 1
                _log.warning("the engine answers again")
                return


class Throughput:
    """Jobs done per second, weighted towards the last 20 ms, and how long a claim takes."""

    def __init__(self) -> None:
        self._per_s = 0.0
        self._claim_s = 0.0
        self._done = 0
        self._at = time.monotonic()

    def prefetch(self, done: int) -> int:
        """How many jobs will be done until more can be here, `done` being the total so far."""
        now = time.monotonic()
        span_s = now - self._at
        if span_s > 0.001:
            weight = 1 - math.exp(-span_s / _RATE_SPAN_S)
            self._per_s += weight * ((done - self._done) / span_s - self._per_s)
            self._done, self._at = done, now
        return min(MAX_BATCH, int(self._per_s * (_AHEAD_S + self._claim_s)))

    def record_claim(self, seconds: float) -> None:
        """A claim came back after so long."""
        self._claim_s += 0.2 * (min(seconds, _MAX_CLAIM_S) - self._claim_s)

    def reset(self) -> None:
        """Begin again from nothing."""
        self._per_s = 0.0
