"""Harness of the engine contract: what an implementation provides, and helpers for the tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, Final, Protocol, TypeVar

import msgspec
import pytest

from holdfast.core.job import Claim, Envelope, Event, Failure, JobInfo, Meta, new_job_ids
from holdfast.core.states import State
from holdfast.core.verdict import (
    DeadLetter,
    Hold,
    Release,
    RetryLater,
    Settlement,
    SettleResult,
    Succeed,
    Suspend,
    Verdict,
)
from holdfast.engine.port import Engine
from holdfast.engine.port.feed import FeedEntry
from holdfast.engine.port.jobs import RetryVia

#: How long a test waits for something that should happen at once.
SOON_S: Final = 10.0
#: A server-side wait that must end early: no test should run to its end.
LONG_WAIT_MS: Final = 30_000

QUEUE: Final = "orders"
OTHER_QUEUE: Final = "emails"

FAILURE: Final = Failure("TASK_ERROR", "the printer is on fire", "PrinterError", "Traceback: line 1")

both_modes = pytest.mark.parametrize("mode", list(RetryVia))

T = TypeVar("T")


class EngineHarness(Protocol):
    """Creates engines for one test, on a store or namespace that no other test uses."""

    async def make(self, **options: Any) -> Engine:
        """Return a new, opened engine with these `EngineOptions`, always on the same store.

        The harness closes its engines when the test ends.
        """
        ...

    async def advance(self, ms: int) -> None:
        """Advance the store's clock: leases expire, retries become due, keys and records expire."""
        ...


async def open_queue(engine: Engine, queue: str) -> None:
    """Let an engine with a ledger accept and run jobs of a queue, as submitters and workers do after a comparison."""
    await engine.attach_reader(queue)
    await engine.open_gate(queue, await engine.epoch(queue))


class Rig:
    """An engine under test and one of its queues."""

    def __init__(self, harness: EngineHarness, engine: Engine, queue: str = QUEUE) -> None:
        self.harness = harness
        self.engine = engine
        self.queue = queue

    @classmethod
    async def on(cls, harness: EngineHarness, **options: Any) -> Rig:
        """Create a rig on an engine with these `EngineOptions`."""
        rig = cls(harness, await harness.make(**options))
        if options.get("ledger"):
            await open_queue(rig.engine, rig.queue)
        return rig

    # Submitting ------------------------------------------------------------------------------------

    def envelope(self, **fields: Any) -> Envelope:
        fields = {"job_id": new_job_ids(1)[0], "task": "print", "payload": b'{"n":1}', "queue": self.queue, **fields}
        return Envelope(**fields)

    async def submit(self, count: int = 1, **fields: Any) -> list[str]:
        receipts = await self.engine.submit([self.envelope(**fields) for _ in range(count)])
        return [receipt.job_id for receipt in receipts]

    async def submit_one(self, **fields: Any) -> str:
        return (await self.submit(1, **fields))[0]

    # Working ---------------------------------------------------------------------------------------

    async def claim(self, worker: str = "w1", limit: int = 100) -> list[Claim]:
        return await self.engine.claim(worker, [self.queue], limit, 0)

    async def claim_one(self, worker: str = "w1") -> Claim:
        claims = await self.claim(worker, 1)
        assert len(claims) == 1, f"expected one claim, got {claims}"
        return claims[0]

    async def start_one(self, worker: str = "w1", **fields: Any) -> Claim:
        """Submit and claim one job."""
        job_id = await self.submit_one(**fields)
        claim = await self.claim_one(worker)
        assert claim.job_id == job_id
        return claim

    async def start(self, count: int, worker: str) -> list[Claim]:
        """Submit and claim some jobs."""
        await self.submit(count)
        claims = await self.claim(worker, count)
        assert len(claims) == count
        return claims

    async def settlement(self, claim: Claim, verdict: Verdict) -> Settlement:
        return Settlement(claim, verdict, await self.engine.now_ms())

    async def settle(self, claim: Claim, verdict: Verdict) -> SettleResult:
        return (await self.engine.settle([await self.settlement(claim, verdict)]))[0]

    async def succeed(self, *claims: Claim) -> list[SettleResult]:
        return await self.engine.settle([await self.settlement(claim, Succeed(b"7")) for claim in claims])

    async def reclaim(self, worker: str = "w2", limit: int = 100) -> list[Claim]:
        return await self.engine.reclaim(worker, [self.queue], limit)

    async def reclaim_one(self, worker: str = "w2") -> Claim:
        claims = await self.reclaim(worker)
        assert len(claims) == 1, f"expected one reclaimed job, got {claims}"
        return claims[0]

    async def promote(self) -> int:
        return (await self.engine.promote([self.queue], 500)).count

    async def claim_due(self, worker: str = "w1") -> list[Claim]:
        """Promote, claim and reclaim: every job that may run now, wherever it waited."""
        await self.promote()
        return await self.claim(worker) + await self.reclaim(worker)

    async def move(self, job_id: str, to: State, **options: Any) -> State:
        return await self.engine.move(self.queue, job_id, to, **{"actor": "ann", "reason": "because", **options})

    async def poison(self, worker: str = "w2") -> None:
        """Make the running job a poison pill, with `max_deliveries=1`: lose it among other jobs, then alone."""
        await self.lose_leases()
        await self.reclaim_one(worker)
        await self.lose_leases()
        assert await self.reclaim(worker) == []

    async def lose_leases(self) -> None:
        await self.harness.advance(self.engine.options.visibility_timeout_ms + 1)

    # Reading ---------------------------------------------------------------------------------------

    async def find(self, job_id: str) -> JobInfo | None:
        return (await self.engine.get(self.queue, [job_id]))[0]

    async def view(self, job_id: str) -> JobInfo:
        view = await self.find(job_id)
        assert view is not None, f"job {job_id} is unknown"
        return view

    async def state(self, job_id: str) -> State:
        return (await self.view(job_id)).state

    async def entries(self, page: int = 100) -> list[FeedEntry]:
        """Read the whole feed in pages; each begins with the last entry of the page before."""
        entries = await self.engine.read_feed(self.queue, "", page)
        while entries:
            first, *more = await self.engine.read_feed(self.queue, entries[-1].position, page)
            assert first == entries[-1]
            if not more:
                break
            entries += more
        return entries

    async def events(self, *job_ids: str) -> list[Event]:
        """Events in the feed; only of these jobs if any are given."""
        events = [event for entry in await self.entries() for event in entry.events]
        return [event for event in events if not job_ids or event.job_id in job_ids]

    async def event_types(self, job_id: str) -> list[str]:
        return [event.type for event in await self.events(job_id)]

    async def open_jobs(self) -> int:
        return sum((await self.engine.stats(self.queue)).states.values())

    # Getting a job into a state --------------------------------------------------------------------

    async def put_in(self, state: State, **fields: Any) -> tuple[str, Claim | None]:
        """Create a job in this state; return its id, and its claim if it had one.

        Needs an engine with `ledger=True`.
        """
        if state is State.QUEUED:
            return await self.submit_one(**fields), None
        if state is State.WAITING_APPROVAL:
            return await self.submit_one(hold=True, **fields), None
        claim = await self.start_one(**fields)
        verdict = _VERDICTS.get(state)
        if verdict is not None:
            assert await self.settle(claim, verdict) is SettleResult.APPLIED
        for step in _MOVES_THEN.get(state, ()):
            await self.move(claim.job_id, step)
        assert await self.state(claim.job_id) is state
        return claim.job_id, claim


_VERDICTS: Final[dict[State, Verdict]] = {
    State.SUCCEEDED: Succeed(b"7"),
    State.RETRYING: RetryLater(60_000, FAILURE),
    State.SUSPENDED: Suspend(FAILURE),
    State.DLQ_PENDING: DeadLetter(FAILURE),
    State.DLQ_RECORDED: DeadLetter(FAILURE),
    State.FAILED: DeadLetter(FAILURE),
}
_MOVES_THEN: Final[dict[State, tuple[State, ...]]] = {
    State.DLQ_RECORDED: (State.DLQ_RECORDED,),
    State.FAILED: (State.DLQ_RECORDED, State.FAILED),
    State.CANCELLED: (State.CANCELLED,),
}

#: One verdict of each kind.
EVERY_VERDICT: Final[tuple[Verdict, ...]] = (
    Succeed(b"7"),
    RetryLater(60_000, FAILURE),
    DeadLetter(FAILURE),
    Suspend(FAILURE),
    Hold("is this right?"),
    Release("draining"),
)


class Contract:
    """Base of the suites: `rig` is an engine with default options on the harness's store."""

    @pytest.fixture
    def mode(self) -> RetryVia:
        """Where retries wait; tests that cover both modes parametrize it."""
        return RetryVia.SCHEDULE

    @pytest.fixture
    async def rig(self, harness: EngineHarness, mode: RetryVia) -> Rig:
        return await Rig.on(harness, retry_via={QUEUE: mode})


async def soon(awaitable: Awaitable[T]) -> T:
    """Return the result; fail after `SOON_S`."""
    return await asyncio.wait_for(awaitable, SOON_S)


def ids(claims: Iterable[Claim]) -> list[str]:
    return [claim.job_id for claim in claims]


def lost_leases(claim: Claim) -> int:
    """Count the lost leases of a job: on earlier messages and on this one."""
    return claim.meta.lost_leases + claim.lease.deliveries - 1


def granted(claims: Iterable[Claim]) -> list[Claim]:
    """Claims for comparison: without the claim time, which only the granting reply has."""
    return sorted((msgspec.structs.replace(claim, claimed_at_ms=0) for claim in claims), key=lambda claim: claim.job_id)


def with_priority(priority: int) -> Meta:
    return Meta(priority=priority)
