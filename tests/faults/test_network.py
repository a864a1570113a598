"""Faults between worker and Redis: slow replies, silence, cut connections, and lost replies.

Each fault hits exactly one call of one script, which the proxy recognises by its hash.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import pytest
from redis.asyncio import Redis

from holdfast import Holdfast, State
from holdfast.core.verdict import Settlement, SettleResult, Succeed
from holdfast.engine.redis.keys import KeyNames, QueueKeys
from holdfast.engine.redis.net.script import Script
from holdfast.errors import EngineUnavailable
from holdfast.verification.chaos.proxy import Proxy
from tests.faults import sample
from tests.faults.conftest import MakeSite
from tests.faults.support import Site, eventually
from tests.worker.support import working

pytestmark = [pytest.mark.faults, pytest.mark.redis]

FAULTS: Final = ("delay", "stall", "cut", "lose")
#: A server that does not reply for this long is unreachable.
REPLY_TIMEOUT_S: Final = 0.5
#: Longer than the reply timeout and the watchdog's interval, shorter than the lease.
STALL_S: Final = 1.2


class FaultProxy(Proxy):
    """A proxy with a fault for the next call of one script."""

    def __init__(self, target_port: int) -> None:
        super().__init__(target_port)
        self._script_sha = b""
        self._fault = ""
        self._cutting: asyncio.Future[None] | None = None
        self.hit = asyncio.Event()

    def arm(self, verb: str, fault: str) -> None:
        """Set the fault of the next call: `delay`, `stall`, `cut` (loses the request), `lose` (loses the reply) or
        `part` (loses everything until `join`)."""
        self._script_sha, self._fault = Script(verb).sha, fault

    def _take_doomed(self, request: bytes) -> bool:
        if not self._script_sha or self._script_sha not in request:
            return super()._take_doomed(request)
        fault, self._script_sha = self._fault, b""
        self.hit.set()
        if fault == "part":
            self.refuse = True
            self._cutting = asyncio.ensure_future(self.cut())
        if fault in ("cut", "part"):
            raise ConnectionResetError("cut before the request was passed on")
        if fault == "stall":
            self.stall()
            asyncio.get_running_loop().call_later(STALL_S, self.flow)
        elif fault == "delay":
            self.delay_s = 0.2
            asyncio.get_running_loop().call_later(0.3, self._end_delay)
        return fault == "lose"

    def join(self) -> None:
        """End a `part` fault."""
        self.refuse = False

    def _end_delay(self) -> None:
        self.delay_s = 0.0


class Link:
    """A site, and an app that reaches it only through the proxy."""

    def __init__(self, site: Site, proxy: FaultProxy) -> None:
        self.site = site
        self.proxy = proxy
        self.app: Holdfast
        self.tasks: sample.Tasks
        self.app, self.tasks = site.make_app(proxy.url)


@pytest.fixture
async def link(redis_url: str, make_site: MakeSite) -> AsyncIterator[Link]:
    site = make_site(redis_url, reply_timeout_s=REPLY_TIMEOUT_S, visibility_timeout_s=5, heartbeat_interval_s=0.2)
    port = int(redis_url.rsplit(":", 1)[1].partition("/")[0])
    # Load every script first, so that the armed call is the one that does the work.
    async with working(site.app):
        await (await site.tasks.flaky.submit()).result(60)
    site.runs_log.unlink()
    async with FaultProxy(port) as proxy:
        link = Link(site, proxy)
        yield link
        proxy.flow()
        await link.app.close()


each_fault = pytest.mark.parametrize("fault", FAULTS)


@pytest.mark.parametrize("fault", ["delay", "cut", "lose"])
async def test_a_fault_during_submit(link: Link, fault: str) -> None:
    """The submission is repeated on a new connection with the same id: one job, not a duplicate."""
    await link.app.open()
    link.proxy.arm("submit", fault)
    job = await link.tasks.work.submit(1)
    assert not job.duplicate
    assert link.proxy.hit.is_set()
    async with working(link.site.app):
        await link.site.assert_all_ended([job.id])
    assert len(link.site.runs()) == 1


async def test_submit_to_a_server_without_replies(link: Link) -> None:
    """A caller without a reply can submit again with the same key: there is one job."""
    keyed = link.tasks.work.options(idempotency_key="order-17")
    await link.app.open()
    link.proxy.arm("submit", "stall")
    with pytest.raises(EngineUnavailable):
        await keyed.submit(1)
    link.proxy.flow()
    job = await keyed.submit(1)
    assert job.duplicate, "the server had accepted it"
    async with working(link.site.app):
        await link.site.assert_all_ended([job.id])
    assert len(link.site.runs()) == 1


@each_fault
async def test_a_fault_during_claim(link: Link, fault: str) -> None:
    """Leases whose reply was lost are recovered by their worker: same attempt, no waiting."""
    jobs = await link.site.tasks.work.submit_many((number,) for number in range(20))
    link.proxy.arm("claim", fault)
    async with _run_worker_behind_proxy(link):
        await link.site.assert_all_ended(job.id for job in jobs)
    _each_ran_once(link)


@each_fault
async def test_a_fault_during_settle(link: Link, fault: str) -> None:
    """Verdicts are sent until answered; a repeated verdict changes nothing and does not count as stale."""
    jobs = await link.site.tasks.work.submit_many((number,) for number in range(20))
    link.proxy.arm("settle", fault)
    async with _run_worker_behind_proxy(link):
        await link.site.assert_all_ended(job.id for job in jobs)
    _each_ran_once(link)
    assert link.app.engine.counters.stale_settles == 0


@pytest.mark.parametrize("task", ["flaky", "fail"])
async def test_a_lost_reply_to_the_settle_of_a_failure(link: Link, task: str) -> None:
    """The retry is counted once, and the dead letter is written once."""
    job = await getattr(link.site.tasks, task).submit()
    link.proxy.arm("settle", "lose")
    async with _run_worker_behind_proxy(link):
        await link.site.assert_all_ended([job.id], State.SUCCEEDED if task == "flaky" else State.FAILED)
    info = await link.site.app.job(job.id).info()
    assert info.meta.retry_count == (1 if task == "flaky" else 0)
    assert (await link.site.app.engine.stats("default")).dead_letters == (1 if task == "fail" else 0)
    assert len(link.site.runs()) == (2 if task == "flaky" else 1)


@each_fault
async def test_a_fault_during_renew(link: Link, fault: str) -> None:
    """The job keeps running and keeps its lease."""
    gate = link.site.gate()
    job = await link.site.tasks.hold.submit(str(gate))
    link.proxy.arm("renew", fault)
    async with _run_worker_behind_proxy(link):
        await asyncio.wait_for(link.proxy.hit.wait(), 10)
        await eventually(_is_renewed(link, job.id), "the lease to be renewed after the fault")
        gate.touch()
        await link.site.assert_all_ended([job.id])
    _each_ran_once(link)


@pytest.mark.parametrize("verb", ["find_expired", "reclaim"])
@pytest.mark.parametrize("fault", ["cut", "lose"])
async def test_a_fault_during_reclaim(redis_url: str, link: Link, verb: str, fault: str) -> None:
    """Jobs of a dead worker are reclaimed by one whose connection breaks during the call."""
    jobs = await link.site.tasks.work.submit_many((number,) for number in range(5))
    await link.site.app.engine.claim("dead", ["default"], 5, 0)
    link.proxy.arm(verb, fault)
    app, _ = link.site.make_app(link.proxy.url, visibility_timeout_s=0.5, heartbeat_interval_s=0.1)
    async with working(app):
        await link.site.assert_all_ended(job.id for job in jobs)
        assert link.proxy.hit.is_set()
    await app.close()
    assert {run.attempt for run in link.site.runs()} == {2}
    assert len(link.site.runs()) == 5


@pytest.mark.parametrize("successor_state", ["done", "still running"])
async def test_a_verdict_after_the_lease_is_refused(link: Link, successor_state: str) -> None:
    """The worker is disconnected before it settles, and reconnects after another worker has reclaimed the job."""
    short: dict[str, Any] = {"visibility_timeout_s": 1.0, "heartbeat_interval_s": 0.2}
    # The late worker does not reclaim the lease of the successor, which is not renewed.
    late, _ = link.site.make_app(link.proxy.url, reclaim=False, **short)
    successor, _ = link.site.make_app(**short)
    gate = link.site.gate()
    async with successor, working(late, upkeep=False) as worker:
        job = await link.site.tasks.hold.submit(str(gate))
        await link.site.wait_running(job.id)
        link.proxy.arm("settle", "part")
        gate.touch()
        await asyncio.wait_for(link.proxy.hit.wait(), 10)
        (claim,) = await eventually(
            lambda: successor.engine.reclaim("successor", ["default"], 1), "the lease to be lost"
        )
        verdict = Settlement(claim, Succeed(b'"by the successor"'), claim.claimed_at_ms)
        if successor_state == "done":
            assert await successor.engine.settle([verdict]) == [SettleResult.APPLIED]
        assert worker.in_flight == 1
        link.proxy.join()
        await eventually(lambda: worker.in_flight == 0, "the reply to the late verdict")
        assert late.engine.counters.stale_settles == 1
        if successor_state == "still running":
            info = await job.info()
            assert (info.state, info.worker) == (State.RUNNING, "successor")
            assert await successor.engine.settle([verdict]) == [SettleResult.APPLIED]
        await link.site.assert_all_ended([job.id])
    assert await job.result() == "by the successor"
    assert (await link.site.final_events())[job.id] == 1


async def test_slow_replies_and_repeated_disconnects(link: Link) -> None:
    """Slow replies and repeated disconnects while jobs of all kinds run."""
    tasks = link.site.tasks
    jobs = [job.id for job in await tasks.nap.submit_many((number, 0.02) for number in range(100))]
    jobs += [(await tasks.flaky.submit()).id for _ in range(10)]
    link.proxy.delay_s = 0.01
    async with working(link.app, concurrency=5):
        for count in (20, 40, 60):
            await eventually(partial(_has_runs, link, count), f"{count} runs")
            await link.proxy.cut()
        await link.site.assert_all_ended(jobs)
    # Within the lease a broken connection does not repeat a run.
    assert len(link.site.runs()) == 120


async def test_a_worker_killed_with_its_settle_in_flight(link: Link) -> None:
    """The engine has applied the verdict, the worker is killed before the reply, and the job does not run again."""
    gate = link.site.gate()
    worker = await link.site.start_worker(url=link.proxy.url)
    job = await link.site.tasks.hold.submit(str(gate))
    await link.site.wait_running(job.id)
    link.proxy.delay_s = 600
    gate.touch()
    assert await job.result(60) == "attempt 1"
    worker.kill()
    link.proxy.delay_s = 0
    async with working(link.site.app):
        another = await link.site.tasks.work.submit(1)
        await link.site.assert_all_ended([job.id, another.id])
    assert len(link.site.runs(job.id)) == 1


@pytest.mark.parametrize("fault", ["cut", "lose"])
async def test_waiting_for_a_result_survives_a_lost_read(link: Link, fault: str) -> None:
    job = await link.tasks.work.submit(1)
    link.proxy.arm("get", fault)
    async with working(link.site.app):
        assert await job.result(60) == 1
    assert link.proxy.hit.is_set()


async def test_waiting_for_a_result_survives_a_disconnect(link: Link) -> None:
    gate = link.site.gate()
    job = await link.tasks.hold.submit(str(gate))
    async with working(link.site.app):
        await link.site.wait_running(job.id)
        waiting = asyncio.create_task(job.result(60))
        await eventually(lambda: link.proxy.connections >= 3, "the caller to listen")
        await link.proxy.cut()
        gate.touch()
        assert await waiting == "attempt 1"


@asynccontextmanager
async def _run_worker_behind_proxy(link: Link) -> AsyncIterator[None]:
    """Run a worker behind the proxy. At the end the fault must have happened and every verdict must be answered."""
    async with working(link.app) as worker:
        yield
        assert link.proxy.hit.is_set(), "the fault never happened"
        await eventually(lambda: worker.in_flight == 0, "the last reply of the engine")


def _is_renewed(link: Link, job_id: str) -> Callable[[], Awaitable[bool]]:
    """Return a check whether the lease was renewed since an earlier check."""
    oldest_ms = 0

    async def check() -> bool:
        nonlocal oldest_ms
        async with Redis.from_url(link.site.url) as redis:
            stream = QueueKeys("default", KeyNames(namespace=str(link.site.settings["namespace"]))).streams[1]
            rows = await redis.xpending_range(stream, "cg:workers", "-", "+", 10)
        idle_ms = int(rows[0]["time_since_delivered"])
        renewed = idle_ms < oldest_ms
        oldest_ms = max(oldest_ms, idle_ms)
        return bool(renewed)

    return check


def _has_runs(link: Link, count: int) -> bool:
    return len(link.site.runs()) >= count


def _each_ran_once(link: Link) -> None:
    runs = link.site.runs()
    assert {run.attempt for run in runs} == {1}
    assert len(runs) == len({run.job_id for run in runs})
