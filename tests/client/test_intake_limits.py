"""Intake limits are judged per call and per tenant, also for calls that share a batch (H5)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.engine.port.operators import QueueControl, TenantControl
from holdfast.errors import IntakeLimited
from holdfast.execution.backend import backend_of


def work_of(app: Holdfast) -> Any:
    @app.task
    async def work(number: int = 0) -> None: ...

    return work


async def limit(app: Holdfast, control: QueueControl) -> None:
    await backend_of(app).open()
    await app.engine.set_control("default", control)


async def backlog(app: Holdfast) -> int:
    return sum((await app.engine.stats("default")).states.values())


async def test_concurrent_submissions_fill_the_queue_up_to_its_limit(both: Holdfast) -> None:
    work = work_of(both)
    await limit(both, QueueControl(intake_limit=3))
    results = await asyncio.gather(*(work.submit(number) for number in range(8)), return_exceptions=True)
    assert [isinstance(result, IntakeLimited) for result in results] == [False] * 3 + [True] * 5
    assert await backlog(both) == 3


async def test_a_tenant_at_its_limit_does_not_refuse_others_in_the_same_batch(both: Holdfast) -> None:
    work = work_of(both)
    await limit(both, QueueControl(tenants={"acme": TenantControl(intake_limit=2)}))
    tenants = ["acme", "zeta", "acme", "default", "acme", "zeta"]
    results = await asyncio.gather(
        *(work.options(tenant_id=tenant).submit(1) for tenant in tenants), return_exceptions=True
    )
    assert [isinstance(result, IntakeLimited) for result in results] == [False, False, False, False, True, False]
    refused = results[4]
    assert isinstance(refused, IntakeLimited)
    assert (refused.tenant_id, refused.limit, refused.queue) == ("acme", 2, "default")
    assert "acme" in str(refused)
    assert await backlog(both) == 5


async def test_a_refused_key_is_free(both: Holdfast) -> None:
    work = work_of(both)
    await limit(both, QueueControl(intake_limit=1))
    results = await asyncio.gather(
        work.submit(1),
        work.options(idempotency_key="k").submit(2),
        work.options(idempotency_key="k").submit(2),
        return_exceptions=True,
    )
    assert [isinstance(result, IntakeLimited) for result in results] == [False, True, True]
    await limit(both, QueueControl())
    assert not (await work.options(idempotency_key="k").submit(2)).duplicate


async def test_submit_many_is_accepted_whole_or_not_at_all(both: Holdfast) -> None:
    work = work_of(both)
    await limit(both, QueueControl(intake_limit=400))
    with pytest.raises(IntakeLimited) as refused:
        await work.submit_many([(number,) for number in range(500)])
    assert refused.value.fits == 400
    assert "400 of these 500 jobs" in str(refused.value)
    assert await backlog(both) == 0
    assert len(await work.submit_many([(number,) for number in range(refused.value.fits)])) == 400


async def test_one_submit_many_does_not_refuse_another(both: Holdfast) -> None:
    work = work_of(both)
    await limit(both, QueueControl(intake_limit=10))
    results = await asyncio.gather(
        work.submit_many([(number,) for number in range(8)]),
        work.submit_many([(number,) for number in range(5)]),
        work.submit_many([(number,) for number in range(2)]),
        return_exceptions=True,
    )
    assert [isinstance(result, IntakeLimited) for result in results] == [False, True, False]
    assert await backlog(both) == 10
