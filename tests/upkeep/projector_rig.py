"""A Redis engine driven by hand, a ledger, and projectors that can be killed at any call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self

from holdfast.clock import SystemClock
from holdfast.core.job import Claim, Envelope, Failure, new_job_ids
from holdfast.core.states import FINAL, State
from holdfast.core.verdict import DeadLetter, RetryLater, Settlement, Succeed, Verdict
from holdfast.engine.port import Engine
from holdfast.factory import build_engine
from holdfast.ledger.port.ledger import FeedPosition, Ledger
from holdfast.ledger.reopen_intake import reopen_intake
from holdfast.ledger.verification import Verifier
from holdfast.settings import Settings
from holdfast.upkeep.projector import Projector
from tests.ledger.projection_rig import QUEUE, check_ledger, open_ledger, rows

WITHIN_S = 30.0
FAILURE = Failure("TASK_ERROR", "boom", "ValueError", "at x")


class Killed(BaseException):
    """Stands for SIGKILL: an error that no handler of the projector catches."""


async def until(condition: Callable[[], Awaitable[bool]], what: str, within_s: float = WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.02)


class ProjectorRig:
    """One namespace of a Redis and one ledger; closes every engine and ledger that it opened."""

    def __init__(self, redis_url: str, ledger_url: str, namespace: str, **options: Any) -> None:
        # Without a tail, the entries that remain after a trim can be counted.
        self.settings = Settings.load(url=redis_url, ledger=ledger_url, namespace=namespace, feed_tail=0)
        self.ledger_url = ledger_url
        self._options = options
        self.engine = build_engine(self.settings, SystemClock())
        self.ledger = open_ledger(ledger_url, **options)
        self._opened: list[Engine | Ledger] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self.engine.open()
        await self.ledger.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        for opened in (*self._opened, self.engine, self.ledger):
            await opened.close()

    # Engine ----------------------------------------------------------------------------------------

    async def reopen_intake(self, queue: str = QUEUE) -> None:
        await reopen_intake(self.engine, self.ledger, queue)
        await Verifier(self.engine, self.ledger).ensure(queue)

    async def submit(self, count: int, queue: str = QUEUE, **more: Any) -> list[str]:
        ids = new_job_ids(count)
        await self.engine.submit([Envelope(job_id=i, task="add", payload=b"{}", queue=queue, **more) for i in ids])
        return ids

    async def claim(self, limit: int = 500, queue: str = QUEUE) -> list[Claim]:
        return await self.engine.claim("w1", [queue], limit, 0)

    async def settle(self, claims: Sequence[Claim], verdict: Verdict | None = None) -> None:
        applied = verdict or Succeed(b"1")
        await self.engine.settle([Settlement(claim, applied, claim.claimed_at_ms) for claim in claims])

    async def work(self, verdict: Verdict | None = None, queue: str = QUEUE) -> int:
        claims = await self.claim(queue=queue)
        await self.settle(claims, verdict)
        return len(claims)

    async def run_mixed_jobs(self, count: int, queue: str = QUEUE) -> list[str]:
        """Run jobs: a third waits for a retry, a third is dead-lettered, the rest succeeds."""
        ids = await self.submit(count, queue)
        claims = await self.claim(count, queue)
        third = len(claims) // 3
        await self.settle(claims[:third], RetryLater(600_000, FAILURE))
        await self.settle(claims[third : 2 * third], DeadLetter(FAILURE))
        await self.settle(claims[2 * third :])
        return ids

    # Ledger ----------------------------------------------------------------------------------------

    def projector(self, engine: Engine | None = None, ledger: Ledger | None = None, **options: Any) -> Projector:
        """Build a projector, with its own connections unless some are given."""
        engine, ledger = engine or self.engine.clone(), ledger or open_ledger(self.ledger_url, **self._options)
        self._opened += [engine, ledger]
        options = {"linger_s": 0.001, "round_s": 0.1, "lease_ms": 300} | options
        return Projector(engine, ledger, **options)

    async def start(self, projector: Projector | None = None) -> Projector:
        projector = projector or self.projector()
        await projector._engine.open()
        self._tasks.append(asyncio.create_task(projector.run()))
        return projector

    async def stop(self) -> None:
        """Stop all projectors as a worker would."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def feed_end(self, queue: str = QUEUE) -> FeedPosition:
        snapshot = await self.engine.snapshot(queue, [])
        return FeedPosition(snapshot.position, snapshot.nonce)

    async def is_caught_up(self, queue: str = QUEUE) -> bool:
        assert self.ledger.projection is not None
        return await self.ledger.projection.position(queue) == await self.feed_end(queue)

    async def wait_settled(self, queue: str = QUEUE) -> None:
        """Wait until the ledger has the whole feed and every dead letter is confirmed."""
        assert self.ledger.projection is not None
        projection = self.ledger.projection

        async def settled() -> bool:
            return (
                await self.is_caught_up(queue)
                and not await projection.unacked_dead_letters(queue, 1)
                and await self.is_caught_up(queue)
            )

        await until(settled, "the ledger has caught up")

    async def check(self, ids: Sequence[str], *, anomalies: int | None = 0, states: bool = True) -> dict[str, Any]:
        """Check that the ledger has these jobs, with complete legal histories and the engine's states."""
        states_by_id = await check_ledger(self.ledger)
        assert states_by_id.keys() >= set(ids), f"{len(set(ids) - states_by_id.keys())} jobs are missing"
        if anomalies is not None:
            anomaly_rows = await rows(self.ledger, "SELECT reason, event FROM anomalies")
            assert len(anomaly_rows) == anomalies, anomaly_rows[:3]
        if states:
            for job_id, info in zip(ids, await self.engine.get(QUEUE, ids), strict=True):
                assert info is not None
                assert states_by_id[job_id] is info.state, job_id
        finals = await rows(
            self.ledger,
            "SELECT job_id, count(*) AS n FROM job_events WHERE to_state IN "
            f"({', '.join(repr(state.value) for state in FINAL)}) GROUP BY tenant_id, job_id, queue",
        )
        assert all(row["n"] == 1 for row in finals)
        return states_by_id


class Killable:
    """A proxy for an engine, ledger or projection that is killed at one call of one method."""

    def __init__(self, real: Any, kill_point: KillPoint) -> None:
        self._real = real
        self._kill_point = kill_point

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if name == "projection":
            return Killable(value, self._kill_point)
        if name == "close" or not asyncio.iscoroutinefunction(value):
            return value

        async def call(*arguments: Any, **options: Any) -> Any:
            self._kill_point.check(name, "before")
            answer = await value(*arguments, **options)
            self._kill_point.check(name, "after")
            return answer

        return call


class KillPoint:
    """When to kill: before or after the n-th call of a method; from then on at every call."""

    def __init__(self, method: str, side: str, nth: int = 1) -> None:
        self._method, self._side, self._left = method, side, nth
        self.reached = asyncio.Event()

    def check(self, method: str, side: str) -> None:
        if (method, side) == (self._method, self._side):
            self._left -= 1
            if self._left == 0:
                self.reached.set()
        if self.reached.is_set():
            raise Killed(f"{self._side} {self._method}")


async def state_of(rig: ProjectorRig, job_id: str) -> State | None:
    (info,) = await rig.engine.get(QUEUE, [job_id])
    return info.state if info else None
