"""Engine contract for the number of queues that a tenant may have (`EngineOptions.tenant_queue_limit`)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.core.job import DEFAULT_QUEUE, Receipt
from holdfast.engine.port import Engine
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import QueueLimitReached
from holdfast.testing.contract.harness import Contract, EngineHarness, Rig


class QueueLimitContract(Contract):
    """Guarantees of the limit of queues: a tenant cannot make more, whatever it already has keeps working."""

    async def test_the_next_new_queue_of_a_tenant_is_refused(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, tenant_queue_limit=2)
        for queue in ("a", "b"):
            await rig.submit(2, queue=queue, tenant_id="acme")
        with pytest.raises(QueueLimitReached) as error:
            await rig.submit(3, queue="c", tenant_id="acme")
        assert (error.value.code, error.value.queue) == ("QUEUE_LIMIT_REACHED", "c")
        assert (error.value.tenant_id, error.value.limit) == ("acme", 2)
        # Calls of several tenants may share a batch.
        assert "acme" not in str(error.value)
        assert rig.engine.counters.intake_refused == 3
        assert await rig.engine.queues() == ["a", "b"]
        assert not any((await rig.engine.stats("c")).states.values())
        # Its queues keep working, also for a process that has not used them, and the default queue is not counted.
        other = await harness.make(tenant_queue_limit=2)
        for queue in ("a", "b", DEFAULT_QUEUE):
            await other.submit([rig.envelope(queue=queue, tenant_id="acme")])
        # Others are not affected: they may submit to its queues, and have their own.
        for queue in ("a", "c", "d"):
            await rig.submit(1, queue=queue, tenant_id="zeta")
        # The queue is not new any more.
        await rig.submit(1, queue="c", tenant_id="acme")
        with pytest.raises(QueueLimitReached):
            await rig.submit(1, queue="e", tenant_id="zeta")
        assert await rig.engine.queues() == ["a", "b", "c", "d", DEFAULT_QUEUE]

    async def test_a_new_queue_belongs_to_a_tenant_that_may_have_it(self, harness: EngineHarness) -> None:
        """Callers of several tenants share a batch: one at its limit does not take the queue from the others."""
        rig = await Rig.on(harness, tenant_queue_limit=1)
        await rig.submit(1, queue="a", tenant_id="acme")
        batch = [rig.envelope(queue="b", tenant_id=tenant) for tenant in ("acme", "zeta")]
        assert await rig.engine.submit_each(batch) == [Receipt(envelope.job_id) for envelope in batch]
        with pytest.raises(QueueLimitReached):
            await rig.submit(1, queue="c", tenant_id="zeta")

    async def test_a_lower_limit_does_not_stop_existing_queues(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness)
        for queue in ("a", "b", "c"):
            await rig.submit(1, queue=queue, tenant_id="acme")
        lower = await harness.make(tenant_queue_limit=1)
        for queue in ("a", "b", "c"):
            await lower.submit([rig.envelope(queue=queue, tenant_id="acme")])
        with pytest.raises(QueueLimitReached):
            await lower.submit([rig.envelope(queue="d", tenant_id="acme")])

    async def test_a_queue_that_an_operator_has_configured_is_not_new(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, tenant_queue_limit=1)
        await rig.submit(1, queue="a", tenant_id="acme")
        await rig.engine.set_control("b", QueueControl(intake_limit=9))
        await rig.submit(1, queue="b", tenant_id="acme")

    async def test_racing_submitters_do_not_exceed_the_limit(self, harness: EngineHarness) -> None:
        limit, rig = 5, Rig(harness, await harness.make())
        engines = [await harness.make(tenant_queue_limit=limit) for _ in range(4)]

        async def submit(engine: Engine, queue: str) -> Any:
            return await engine.submit([rig.envelope(queue=queue, tenant_id="acme")])

        calls = [submit(engine, f"q{number}") for number in range(8) for engine in engines]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert {type(error) for error in errors} == {QueueLimitReached}
        assert len(await rig.engine.queues()) == limit
