"""Deployments in one Redis: none reads, cancels or pauses jobs of another, whatever the names of both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from holdfast.core.states import State
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import UnknownJob
from holdfast.testing.contract.harness import Rig
from tests.conftest import MakeServer
from tests.engine.harness import RedisHarness

pytestmark = pytest.mark.redis


class Neighbours:
    """Engines in one Redis, each with its own names; `close` removes what they wrote."""

    def __init__(self, url: str, namespace: str) -> None:
        self._url = url
        self._namespace = namespace
        self._made: list[tuple[RedisHarness, str]] = []

    async def rig(self, namespace: str, queue: str, **names: Any) -> Rig:
        harness = RedisHarness(self._url, namespace)
        harness.names = replace(harness.names, **names)
        self._made.append((harness, queue))
        return Rig(harness, await harness.make(), queue)

    @property
    def redis(self) -> Any:
        return self._made[0][0].redis

    async def close(self) -> None:
        for harness, queue in self._made:
            await harness.redis.srem(harness.names.queues, queue)
            async for key in harness.redis.scan_iter(match=f"*{self._namespace}*"):
                await harness.redis.delete(key)
            for engine in harness._made:
                await engine.close()
            await harness.redis.aclose()


@pytest.fixture(params=["redis_url", "cluster_url"], ids=["one-server", "cluster"])
async def neighbours(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[Neighbours]:
    found = Neighbours(request.getfixturevalue(request.param), namespace)
    yield found
    await found.close()


async def check_separate(one: Rig, other: Rig) -> None:
    """Neither can claim, read, cancel or pause what the other has. The job ids are names of keys."""
    job_id = await one.submit_one(job_id="stream:task")
    assert await other.claim() == []
    assert await other.find(job_id) is None
    with pytest.raises(UnknownJob):
        await other.move(job_id, State.CANCELLED)
    await other.engine.set_control(other.queue, QueueControl(paused=True))
    assert not (await one.engine.get_control(one.queue)).paused
    await other.submit_one(job_id="queues")
    assert (await one.engine.queues()).count(one.queue) == 1
    claim = await one.claim_one()
    assert claim.job_id == job_id
    await one.succeed(claim)
    assert (await one.open_jobs(), await other.open_jobs()) == (0, 1)
    assert await one.find("queues") is None


@pytest.mark.parametrize("rest", ["emails", "emails:eu", "default"])
async def test_a_colon_in_a_queue_name_does_not_make_a_namespace(
    neighbours: Neighbours, namespace: str, rest: str
) -> None:
    plain = await neighbours.rig("", f"{namespace}:{rest}")
    in_namespace = await neighbours.rig(namespace, rest)
    await check_separate(plain, in_namespace)


@pytest.mark.parametrize(
    ("literal", "in_namespace"),
    [
        ({"stream_task": "shop:stream:task", "queue_retry": "shop:queue:control"}, {}),
        ({"stream_task": "shop:tasks", "stream_result": "shop:out"}, {"stream_task": "tasks", "stream_result": "out"}),
    ],
)
async def test_a_colon_in_a_configured_name_does_not_make_a_namespace(
    make_redis: MakeServer, literal: dict[str, str], in_namespace: dict[str, str]
) -> None:
    neighbours = Neighbours(make_redis().url, "")
    await check_separate(
        await neighbours.rig("", "default", **literal), await neighbours.rig("shop", "default", **in_namespace)
    )
    await neighbours.close()


async def test_keys_of_an_earlier_version_are_reported(neighbours: Neighbours, namespace: str) -> None:
    """Unless the namespace that has them uses them."""
    rig = await neighbours.rig("", f"{namespace}:emails")
    await rig.submit_one()
    redis, check = neighbours.redis, f"names of {rig.queue}"
    former = f"{{{namespace}:emails}}:queue:control"
    assert check not in {finding.check for finding in await rig.engine.diagnose([rig.queue])}
    await redis.hset(former, "marker", "holdfast:old")
    (finding,) = [finding for finding in await rig.engine.diagnose([rig.queue]) if finding.check == check]
    assert (finding.ok, finding.warning) == (False, False)
    assert former in finding.message
    await redis.sadd(f"{namespace}:queues", "emails")
    assert check not in {finding.check for finding in await rig.engine.diagnose([rig.queue])}


async def test_a_configured_name_of_an_earlier_version_is_reported(neighbours: Neighbours, namespace: str) -> None:
    rig = await neighbours.rig(namespace, "default", stream_task="tasks")
    await neighbours.redis.xadd(f"{namespace}:tasks", {"task_id": "1"})
    found = [finding.message for finding in await rig.engine.diagnose(["default"]) if "names of" in finding.check]
    on_one_server = not rig.engine._names.cluster  # type: ignore[attr-defined]
    assert found == [f"keys of an earlier version are not read: {namespace}:tasks"] * on_one_server
