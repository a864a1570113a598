"""Between worker and Redis: slow replies, silence, cut connections, and replies lost after the work was done.

Each fault hits exactly one call of one verb: the one that carries the job. The proxy knows it by its script.
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
from holdfast.engine.redis.net.client import Script
from holdfast.errors import EngineUnavailable
from holdfast.verification.chaos.proxy import Proxy
from tests.faults import sample
from tests.faults.conftest import MakeSite
from tests.faults.support import Site, eventually
from tests.worker.support import working

pytestmark = [pytest.mark.faults, pytest.mark.redis]

FAULTS: Final = ("delay", "stall", "cut", "lose")
#: A silent server counts as down after this long.
REPLY_TIMEOUT_S: Final = 0.5
#: Longer than the reply timeout and the watchdog's interval, shorter than the lease.
STALL_S: Final = 1.2


class FaultProxy(Proxy):
    """A proxy with a fault for the next request that contains some bytes."""

    def __init__(self, target_port: int) -> None:
        super().__init__(target_port)
        self._sign = b""
        self._fault = ""
        self._cutting: asyncio.Future[None] | None = None
        self.hit = asyncio.Event()

    def arm(self, verb: str, fault: str) -> None:
        """`delay`, `stall`, `cut` (the request never arrives), `lose` (only the reply does not), or `part`: from
        this request on nothing goes through, until `join`."""
        self._sign, self._fault = Script(verb).sha, fault

    def _take_doomed(self, request: bytes) -> bool:
        if not self._sign or self._sign not in request:
            return super()._take_doomed(request)
        fault, self._sign = self._fault, b""
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
            asyncio.get_running_loop().call_later(0.3, self._hurry)
        return fault == "lose"

    def join(self) -> None:
        """The end of a partition."""
        self.refuse = False

    def _hurry(self) -> None:
        self.delay_s = 0.0


class Link:
    """A site, and an app that reaches it through the proxy only."""

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
    # Every script is known to the server, so that the armed call is the one that does the work.
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
async def test_submit(link: Link, fault: str) -> None:
    """A broken connection is mended and the submission sent again under the same id: one job, no duplicate."""
    await link.app.open()
    link.proxy.arm("submit", fault)
    job = await link.tasks.work.submit(1)
    assert not job.duplicate
    assert link.proxy.hit.is_set()
    async with working(link.site.app):
        await link.site.all_is_well([job.id])
    assert len(link.site.runs()) == 1


async def test_submit_to_a_silent_server(link: Link) -> None:
    """A caller that got no answer cannot know; with a key it may ask again, and there is one job."""
    keyed = link.tasks.work.options(idempotency_key="order-17")
    await link.app.open()
    link.proxy.arm("submit", "stall")
    with pytest.raises(EngineUnavailable):
        await keyed.submit(1)
    link.proxy.flow()
    job = await keyed.submit(1)
    assert job.duplicate, "the server had accepted it"
    async with working(link.site.app):
        await link.site.all_is_well([job.id])
    assert len(link.site.runs()) == 1


@each_fault
async def test_claim(link: Link, fault: str) -> None:
    """Leases whose news never came are found again by the worker that holds them: same attempt, no waiting."""
    jobs = await link.site.tasks.work.submit_many((number,) for number in range(20))
    link.proxy.arm("claim", fault)
    async with _through(link):
        await link.site.all_is_well(job.id for job in jobs)
    _each_ran_once(link)


@each_fault
async def test_settle(link: Link, fault: str) -> None:
    """Sent until answered; a second copy of what was applied changes nothing, and is not taken for a late one."""
    jobs = await link.site.tasks.work.submit_many((number,) for number in range(20))
    link.proxy.arm("settle", fault)
    async with _through(link):
        await link.site.all_is_well(job.id for job in jobs)
    _each_ran_once(link)
    assert link.app.engine.counters.stale_settles == 0


@pytest.mark.parametrize("task", ["flaky", "fail"])
async def test_settle_of_a_failure_whose_reply_is_lost(link: Link, task: str) -> None:
    """A retry is not counted twice, a dead letter is not written twice."""
    job = await getattr(link.site.tasks, task).submit()
    link.proxy.arm("settle", "lose")
    async with _through(link):
        await link.site.all_is_well([job.id], State.SUCCEEDED if task == "flaky" else State.FAILED)
    view = await link.site.app.job(job.id).info()
    assert view.meta.retry_count == (1 if task == "flaky" else 0)
    assert (await link.site.app.engine.stats("default")).dead_letters == (1 if task == "fail" else 0)
    assert len(link.site.runs()) == (2 if task == "flaky" else 1)


@each_fault
async def test_renew(link: Link, fault: str) -> None:
    """The job runs on and keeps its lease."""
    gate = link.site.gate()
    job = await link.site.tasks.hold.submit(str(gate))
    link.proxy.arm("renew", fault)
    async with _through(link):
        await asyncio.wait_for(link.proxy.hit.wait(), 10)
        await eventually(_is_renewed(link, job.id), "the lease to be renewed after the fault")
        gate.touch()
        await link.site.all_is_well([job.id])
    _each_ran_once(link)


@pytest.mark.parametrize("verb", ["find_expired", "reclaim"])
@pytest.mark.parametrize("fault", ["cut", "lose"])
async def test_reclaim(redis_url: str, link: Link, verb: str, fault: str) -> None:
    """A dead worker's jobs, taken over by one whose connection breaks at that moment."""
    jobs = await link.site.tasks.work.submit_many((number,) for number in range(5))
    await link.site.app.engine.claim("dead", ["default"], 5, 0)
    link.proxy.arm(verb, fault)
    app, _ = link.site.make_app(link.proxy.url, visibility_timeout_s=0.5, heartbeat_interval_s=0.1)
    async with working(app):
        await link.site.all_is_well(job.id for job in jobs)
        assert link.proxy.hit.is_set()
    await app.close()
    assert {run.attempt for run in link.site.runs()} == {2}
    assert len(link.site.runs()) == 5


@pytest.mark.parametrize("heir_is", ["done", "still at it"])
async def test_a_verdict_that_comes_after_the_lease_is_refused(link: Link, heir_is: str) -> None:
    """The worker is cut off when it wants to settle, and comes back when another one has the job, or has done it."""
    short: dict[str, Any] = {"visibility_timeout_s": 1.0, "heartbeat_interval_s": 0.2}
    late, _ = link.site.make_app(link.proxy.url, **short)
    heir, _ = link.site.make_app(**short)
    gate = link.site.gate()
    # Without upkeep the late worker reclaims nothing: the heir's own lease, which no one renews, stays the heir's.
    async with heir, working(late, upkeep=False) as worker:
        job = await link.site.tasks.hold.submit(str(gate))
        await link.site.is_running(job.id)
        link.proxy.arm("settle", "part")
        gate.touch()
        await asyncio.wait_for(link.proxy.hit.wait(), 10)
        (claim,) = await eventually(lambda: heir.engine.reclaim("heir", ["default"], 1), "the lease to be lost")
        verdict = Settlement(claim, Succeed(b'"by the heir"'), claim.claimed_at_ms)
        if heir_is == "done":
            assert await heir.engine.settle([verdict]) == [SettleResult.APPLIED]
        assert worker.in_flight == 1
        link.proxy.join()
        await eventually(lambda: worker.in_flight == 0, "the answer to the late verdict")
        assert late.engine.counters.stale_settles == 1
        if heir_is == "still at it":
            view = await job.info()
            assert (view.state, view.worker) == (State.RUNNING, "heir")
            assert await heir.engine.settle([verdict]) == [SettleResult.APPLIED]
        await link.site.all_is_well([job.id])
    assert await job.result() == "by the heir"
    assert (await link.site.final_events())[job.id] == 1


async def test_everything_at_once(link: Link) -> None:
    """Slow, then cut again and again, while jobs of all sorts go through."""
    tasks = link.site.tasks
    jobs = [job.id for job in await tasks.nap.submit_many((number, 0.02) for number in range(100))]
    jobs += [(await tasks.flaky.submit()).id for _ in range(10)]
    link.proxy.delay_s = 0.01
    async with working(link.app, concurrency=5):
        for wanted in (20, 40, 60):
            await eventually(partial(_has_run, link, wanted), f"{wanted} runs")
            await link.proxy.cut()
        await link.site.all_is_well(jobs)
    # Within the lease a broken connection makes nothing run twice.
    assert len(link.site.runs()) == 120


async def test_killed_with_its_settle_in_flight(link: Link) -> None:
    """The engine has the verdict, the worker will never know, and the job does not run again."""
    gate = link.site.gate()
    worker = await link.site.started(url=link.proxy.url)
    job = await link.site.tasks.hold.submit(str(gate))
    await link.site.is_running(job.id)
    link.proxy.delay_s = 600
    gate.touch()
    assert await job.result(60) == "attempt 1"
    worker.kill()
    link.proxy.delay_s = 0
    async with working(link.site.app):
        more = await link.site.tasks.work.submit(1)
        await link.site.all_is_well([job.id, more.id])
    assert len(link.site.runs(job.id)) == 1


async def test_a_caller_waits_for_a_result_through_a_broken_line(link: Link) -> None:
    gate = link.site.gate()
    job = await link.tasks.hold.submit(str(gate))
    async with working(link.site.app):
        await link.site.is_running(job.id)
        waiting = asyncio.create_task(job.result(60))
        await eventually(lambda: link.proxy.connections >= 3, "the caller to listen")
        await link.proxy.cut()
        gate.touch()
        assert await waiting == "attempt 1"


@asynccontextmanager
async def _through(link: Link) -> AsyncIterator[None]:
    """A worker behind the proxy, until the fault has happened, the test is done, and every verdict is answered."""
    async with working(link.app) as worker:
        yield
        assert link.proxy.hit.is_set(), "the fault never happened"
        await eventually(lambda: worker.in_flight == 0, "the engine's last answer")


def _is_renewed(link: Link, job_id: str) -> Callable[[], Awaitable[bool]]:
    """Whether its lease is younger than it was at some earlier look."""
    oldest_ms = 0

    async def look() -> bool:
        nonlocal oldest_ms
        async with Redis.from_url(link.site.url) as redis:
            stream = QueueKeys("default", KeyNames(namespace=str(link.site.settings["namespace"]))).streams[1]
            rows = await redis.xpending_range(stream, "cg:workers", "-", "+", 10)
        idle_ms = int(rows[0]["time_since_delivered"])
        renewed = idle_ms < oldest_ms
        oldest_ms = max(oldest_ms, idle_ms)
        return bool(renewed)

    return look


def _has_run(link: Link, count: int) -> bool:
    return len(link.site.runs()) >= count


def _each_ran_once(link: Link) -> None:
    runs = link.site.runs()
    assert {run.attempt for run in runs} == {1}
    assert len(runs) == len({run.job_id for run in runs})
