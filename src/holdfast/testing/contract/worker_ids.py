"""Engine contract for stable identities of workers (Q5)."""

from __future__ import annotations

import asyncio

from holdfast.engine.port.reads import Finding
from holdfast.engine.port.worker_ids import KEEP_ID_MS, KEEP_REPLACED_MS, MANY_REPLACED, WorkerIdStatus, WorkerStart
from holdfast.testing.contract.harness import OTHER_QUEUE, QUEUE, Contract, Rig

_BOTH = (QUEUE, OTHER_QUEUE)


class WorkerIdContract(Contract):
    """Guarantees of `next_generation` and `keep_worker_id`."""

    async def test_a_second_start_replaces_the_first(self, rig: Rig) -> None:
        first = await _start(rig, "w1")
        assert await rig.engine.keep_worker_id(first, _BOTH) == WorkerIdStatus()
        assert await rig.engine.keep_worker_id(first, _BOTH) == WorkerIdStatus()
        second = await _start(rig, "w2")
        assert second.generation > first.generation
        assert await rig.engine.keep_worker_id(second, _BOTH) == WorkerIdStatus(("w1",))
        assert await rig.engine.keep_worker_id(second, _BOTH) == WorkerIdStatus()
        assert await rig.engine.keep_worker_id(first, _BOTH) == WorkerIdStatus(successor="w2")
        # Only in common queues, and only the same id.
        assert await rig.engine.keep_worker_id(await _start(rig, "w3"), ["reports"]) == WorkerIdStatus()
        assert await rig.engine.keep_worker_id(await _start(rig, "w4", "web-1"), _BOTH) == WorkerIdStatus()
        assert await rig.engine.keep_worker_id(second, _BOTH) == WorkerIdStatus()

    async def test_of_several_starts_at_a_time_the_same_one_has_the_id_in_every_queue(self, rig: Rig) -> None:
        here, there = [QUEUE], [OTHER_QUEUE]
        earlier, later = (WorkerStart("web-0", worker, 5) for worker in ("w1", "w2"))
        for start, queues in ((earlier, here), (later, here), (later, there), (earlier, there)):
            await rig.engine.keep_worker_id(start, queues)
        assert (await rig.engine.keep_worker_id(earlier, _BOTH)).successor == "w2"
        assert await rig.engine.keep_worker_id(later, _BOTH) == WorkerIdStatus()
        starts = [WorkerStart("web-0", f"w{number}", await _next(rig)) for number in range(3, 9)]
        await asyncio.gather(*(rig.engine.keep_worker_id(start, _BOTH) for start in starts))
        status = await asyncio.gather(*(rig.engine.keep_worker_id(start, _BOTH) for start in starts))
        assert [each.successor for each in status] == ["w8"] * 5 + [""]

    async def test_an_id_that_is_replaced_repeatedly_is_reported(self, rig: Rig) -> None:
        await rig.submit_one()
        last = await _start(rig, "w0")
        await rig.engine.keep_worker_id(last, _BOTH)
        for number in range(1, MANY_REPLACED + 1):
            assert await _findings(rig) == []
            replaced, last = last, await _start(rig, f"w{number}")
            await rig.engine.keep_worker_id(last, _BOTH)
            # Counted once, although it is replaced in both queues and may learn that twice.
            for _ in range(2):
                assert (await rig.engine.keep_worker_id(replaced, _BOTH)).successor == last.worker
        (finding,) = await _findings(rig)
        assert (finding.ok, finding.warning) == (False, True)
        assert finding.check == "worker id web-0"
        assert f"{MANY_REPLACED} of them were replaced" in finding.message
        assert "--id" in finding.remedy
        await rig.harness.advance(KEEP_REPLACED_MS + 1)
        assert await _findings(rig) == []

    async def test_starts_at_the_same_time_are_counted_each(self, rig: Rig) -> None:
        await rig.submit_one()
        generation = await _next(rig)
        starts = [WorkerStart("web-0", f"w{number}", generation) for number in range(MANY_REPLACED + 1)]
        for _ in range(2):
            for start in starts:
                await rig.engine.keep_worker_id(start, _BOTH)
        assert len(await _findings(rig)) == 1

    async def test_restarts_are_not_reported(self, rig: Rig) -> None:
        for number in range(MANY_REPLACED + 2):
            await rig.engine.keep_worker_id(await _start(rig, f"w{number}"), [QUEUE])
        assert await _findings(rig) == []

    async def test_an_id_that_is_not_used_any_more_is_deleted(self, rig: Rig) -> None:
        await rig.engine.keep_worker_id(await _start(rig, "w1"), [QUEUE])
        await rig.harness.advance(KEEP_ID_MS + rig.engine.options.visibility_timeout_ms + 1)
        assert await rig.engine.keep_worker_id(await _start(rig, "w2"), [QUEUE]) == WorkerIdStatus()


async def _next(rig: Rig, worker_id: str = "web-0") -> int:
    return await rig.engine.next_generation(worker_id, _BOTH)


async def _start(rig: Rig, worker: str, worker_id: str = "web-0") -> WorkerStart:
    return WorkerStart(worker_id, worker, await _next(rig, worker_id))


async def _findings(rig: Rig) -> list[Finding]:
    return [each for each in await rig.engine.diagnose(_BOTH) if each.check.startswith("worker id")]
