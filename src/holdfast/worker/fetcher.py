"""Supply the runner with jobs.

One loop claims while there is capacity, reclaims expired leases and recovers from failures, in sequence, so that no
lease reaches the runner twice: `engine.recover_claims` returns the leases that the engine has for this worker after a
lost reply, and no other claim is in flight meanwhile.

Of expired leases, jobs that had not started are released for any worker to claim. The others are suspects, which run
alone (`suspects`).

The capacity is `concurrency` plus a prefetch: the jobs that will finish within 10 ms and during one claim, at the
current rate. That is zero for slow tasks and a few hundred for no-ops, and needs no tuning.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from random import Random
from typing import Final, Protocol

from holdfast.aio import raise_if_cancelled
from holdfast.core.job import MAX_BATCH, Claim, Lease
from holdfast.core.retry import Backoff
from holdfast.engine.port.jobs import JobPort
from holdfast.errors import EngineUnavailable
from holdfast.settings import Settings
from holdfast.upkeep.lost_leases import LostLeases
from holdfast.worker.in_flight import InFlight
from holdfast.worker.runner import Runner

_log: Final = logging.getLogger("holdfast.worker")

#: Longest wait of a claim on the server; short enough to notice a store that has stopped answering.
_WAIT_S: Final = 5.0
#: The loop ticks at least this often; readiness depends on it.
_TICK_S: Final = 1.0
#: A worker whose loop has not ticked for this long is not ready.
_STALE_S: Final = 10.0

_AHEAD_S: Final = 0.010
_RATE_SPAN_S: Final = 0.020
#: A claim that takes longer does not increase the prefetch further.
_MAX_CLAIM_S: Final = 0.050
#: Steps of one reclaim.
_MAX_STEPS: Final = 50
#: Shortest reclaim interval, even if the setting is 0.
_MIN_RECLAIM_S: Final = 0.02


class Isolation(Protocol):
    """Who runs the suspects that a worker finds."""

    async def run_suspects(self, fetcher: Fetcher) -> float:
        """Called between two claims while there are suspects; returns after how many seconds to call it again."""
        ...


class Fetcher:
    """Claims jobs for the runner. Runs on one event loop."""

    def __init__(
        self,
        engine: JobPort,
        worker: str,
        queues: Sequence[str],
        runner: Runner,
        in_flight: InFlight,
        settings: Settings,
        lost: LostLeases,
        isolation: Isolation | None = None,
        *,
        quota: int | None = None,
        random: Random | None = None,
    ) -> None:
        self._engine = engine
        self._worker = worker
        self._queues = tuple(queues)
        self._runner = runner
        self._in_flight = in_flight
        self._settings = settings
        self._lost = lost
        #: None: suspects are left to others.
        self._isolation = isolation
        #: Limit of jobs to run in total; None: no limit.
        self._quota = quota
        self._random = random or Random()
        self._backoff = Backoff(self._random)
        self._rate = Throughput()
        self._capacity_freed = asyncio.Event()
        self._ticked_at = -math.inf
        self._reclaim_at = 0.0
        runner.wake = self._capacity_freed.set

    @property
    def ready(self) -> bool:
        """Whether the loop ticked recently and the engine answered."""
        return self._backoff.failures == 0 and time.monotonic() - self._ticked_at < _STALE_S

    @property
    def is_new(self) -> bool:
        """Whether the loop has not ticked yet."""
        return self._ticked_at == -math.inf and self._backoff.failures == 0

    async def run(self) -> None:
        """Fetch until cancelled."""
        this_task = asyncio.current_task()
        assert this_task is not None
        # A library may have swallowed the cancellation.
        while not this_task.cancelling():
            try:
                await self._run_once()
            except EngineUnavailable as exc:
                log = _log.info if self._backoff.failures else _log.warning
                log("cannot reach the engine, retrying: %s", exc)
                await self._recover()
            except Exception:  # noqa: BLE001 - top of a loop
                _log.exception("fetching failed unexpectedly, retrying")
                await self._recover()
            else:
                self._on_recovery()
        raise asyncio.CancelledError

    @property
    def suspects(self) -> int:
        """Jobs of lost workers that must run alone, as of the last reclaim."""
        return self._lost.suspects

    @property
    def is_idle(self) -> bool:
        """Whether the worker has no job, not even one with a verdict to be settled."""
        return self._runner.is_idle

    async def reclaim(self) -> None:
        """Release jobs with expired leases that had not started, and count the suspects.

        Retries in the pending list are claimed up to the free capacity.
        """
        limit = self._settings.reclaim_batch
        for _ in range(_MAX_STEPS):
            try:
                claims = await self._lost.reclaim(
                    self._queues,
                    limit,
                    max(0, min(self._space(), limit)),
                    in_flight=self._leases(),
                    release=self._settings.reclaim,
                )
            except EngineUnavailable:
                self._engine.counters.reclaim_errors += 1
                raise
            if claims:
                self._accept(claims)
            if self._lost.found < limit:
                return

    async def run_suspect(self, lease_s: float) -> bool:
        """Run one suspect, if there is one, until it has ended or has run alone for one lease. The worker is idle."""
        claims = await self._lost.claim_suspect(self._queues)
        self._lost.suspects = max(0, self._lost.suspects - 1) if claims else 0
        if claims:
            self._accept(claims)
            await self.wait_idle(lease_s)
        return bool(claims)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until the worker is idle, without claiming; False if the timeout passes first."""
        deadline = time.monotonic() + timeout_s
        while not self.is_idle:
            self._ticked_at = now = time.monotonic()
            if now >= deadline:
                return False
            wait_s = min(_TICK_S, deadline - now)
            if self._runner.load:
                await self._wait_for_load(0, wait_s)
            else:
                await self._runner.settled(wait_s)
        return True

    async def recover_claims(self) -> None:
        """Accept leases whose reply was lost: the engine has them for this worker, the worker does not."""
        claims = await self._engine.recover_claims(self._worker, self._queues, self._leases())
        if claims:
            _log.info("recovered %d claims whose reply was lost", len(claims))
            # These may be from before an outage: they may set the clock forward, but not back.
            if (claimed_at_ms := max(claim.claimed_at_ms for claim in claims)) > self._runner.now_ms():
                self._runner.set_engine_time(claimed_at_ms)
            self._runner.accept(await self._without_lost(claims))

    def reclaim_soon(self) -> None:
        """Reclaim before the next claim, because leases have expired."""
        self._reclaim_at = 0.0

    def stop_prefetching(self) -> None:
        """Prefetch nothing until jobs finish again; for prefetched jobs that do not start."""
        self._rate.reset()

    async def _run_once(self) -> None:
        limit = await self._wait_for_capacity()
        now = time.monotonic()
        if now >= self._reclaim_at:
            self._reclaim_at = now + self._reclaim_pause()
            await self.reclaim()
            limit = self._space()
        again_s = math.inf
        if self._lost.suspects and self._isolation is not None:
            again_s = await self._isolation.run_suspects(self)
            limit = self._space()
        self._ticked_at = time.monotonic()
        if limit > 0:
            began = time.monotonic()
            claims = await self._engine.claim(self._worker, self._queues, limit, self._wait_ms(again_s), self._leases)
            if claims:
                if any(claim.lease.deliveries > 1 for claim in claims):
                    claims = await self._without_lost(claims)
                if len(claims) == limit:
                    # A full batch did not wait for jobs: this is the round trip to the store.
                    self._rate.record_claim(time.monotonic() - began)
                self._accept(claims)
                if len(claims) < limit:
                    # No more jobs are ready: let these start before the next claim.
                    await asyncio.sleep(0)

    async def _wait_for_capacity(self) -> int:
        """Wait for capacity, or for the next reclaim; returns how many to claim.

        At a high rate, waits for a worthwhile batch.
        """
        runner = self._runner
        while True:
            ahead = self._rate.prefetch(runner.finished)
            capacity = runner.concurrency + ahead
            worthwhile = max(1, min(ahead, capacity // 4, self._count_left()))
            if (space := min(capacity - runner.load, self._count_left())) >= worthwhile:
                return min(space, MAX_BATCH)
            left_s = self._reclaim_at - time.monotonic()
            if left_s <= 0:
                return min(space, MAX_BATCH)
            self._on_recovery()  # there is nothing to claim for
            await self._wait_for_load(capacity - worthwhile, min(_TICK_S, left_s))

    async def _wait_for_load(self, load: int, timeout_s: float) -> None:
        """Wait until the runner has no more jobs than that, or the timeout passes."""
        self._capacity_freed.clear()
        self._runner.wake_at = load
        try:
            async with asyncio.timeout(timeout_s):
                await self._capacity_freed.wait()
        except TimeoutError:
            self._ticked_at = time.monotonic()
        finally:
            self._runner.wake_at = -1

    async def _without_lost(self, claims: list[Claim]) -> list[Claim]:
        """Release what was reclaimed in a lost reply: it must not run among other jobs."""
        return await self._lost.release_lost(claims)

    def _leases(self) -> set[Lease]:
        """Leases that this worker has."""
        return {run.claim.lease for run in self._in_flight}

    def _space(self) -> int:
        return min(self._runner.concurrency - self._runner.load, self._count_left(), MAX_BATCH)

    def _count_left(self) -> int:
        # Counts runs, not claims: jobs that were released, or lost before they started, do not use up the quota.
        return MAX_BATCH if self._quota is None else self._quota - self._runner.finished - self._runner.load

    def _accept(self, claims: list[Claim]) -> None:
        # The claim time is the engine's clock of a moment ago.
        self._runner.set_engine_time(claims[-1].claimed_at_ms)
        self._runner.accept(claims)

    def _wait_ms(self, again_s: float) -> int:
        if self._backoff.failures:
            return 0  # recovery is reported without delay
        left_s = max(_MIN_RECLAIM_S, min(again_s, self._reclaim_at - time.monotonic()))
        return round(min(_WAIT_S, left_s) * 1000)

    def _reclaim_pause(self) -> float:
        """Seconds to the next reclaim: at most the interval, with jitter to spread the workers."""
        interval_s = max(_MIN_RECLAIM_S, self._settings.reclaim_interval_s)
        return interval_s * self._random.uniform(0.6, 1.0)

    async def _recover(self) -> None:
        """Retry until the engine answers; then accept claims whose replies were lost.

        The engine has recovered only after a claim: a server that refuses writes answers reads.
        """
        while True:
            raise_if_cancelled()
            await asyncio.sleep(self._backoff.next_s())
            try:
                await self.recover_claims()
            except EngineUnavailable as exc:
                _log.info("still cannot reach the engine: %s", exc)
            except Exception:  # noqa: BLE001 - top of a loop
                _log.exception("recovering claims failed unexpectedly, retrying")
            else:
                return

    def _on_recovery(self) -> None:
        if self._backoff.failures:
            self._backoff.reset()
            self._engine.counters.reconnects += 1
            _log.warning("connection to the engine recovered")


class Throughput:
    """Jobs finished per second, weighted towards the last 20 ms, and the duration of a claim."""

    def __init__(self) -> None:
        self._per_s = 0.0
        self._claim_s = 0.0
        self._done = 0
        self._at = time.monotonic()

    def prefetch(self, done: int) -> int:
        """Number of jobs that will finish before more can arrive; `done` is the total so far."""
        now = time.monotonic()
        span_s = now - self._at
        if span_s > 0.001:
            weight = 1 - math.exp(-span_s / _RATE_SPAN_S)
            self._per_s += weight * ((done - self._done) / span_s - self._per_s)
            self._done, self._at = done, now
        return min(MAX_BATCH, int(self._per_s * (_AHEAD_S + self._claim_s)))

    def record_claim(self, seconds: float) -> None:
        """Record the duration of a claim."""
        self._claim_s += 0.2 * (min(seconds, _MAX_CLAIM_S) - self._claim_s)

    def reset(self) -> None:
        """Reset the rate to 0."""
        self._per_s = 0.0
