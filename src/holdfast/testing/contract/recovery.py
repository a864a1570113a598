"""Engine contract for recovery: lost jobs and keys are restored from the ledger (L4, E1).

No job is lost in these tests: jobs of one queue are restored into another queue, which does not know them.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.core.job import JobInfo, Meta
from holdfast.core.states import FINAL, RESTORED_EVENT, State
from holdfast.core.verdict import Release, RetryLater
from holdfast.engine.port.feed import EngineSnapshot, SubmissionKey
from holdfast.errors import InvalidOption
from holdfast.testing.contract.harness import FAILURE, OTHER_QUEUE, Contract, EngineHarness, Rig, ids, open_queue

OPEN = sorted(set(State) - FINAL)
FIELDS: dict[str, Any] = {"tenant_id": "acme", "idempotency_key": "k", "trace_id": "t"}
META = Meta(context={"user": "u1"}, max_retries=9)


def lost(*views: JobInfo) -> list[JobInfo]:
    """Return the same jobs in the queue that does not know them."""
    return [msgspec.structs.replace(view, queue=OTHER_QUEUE) for view in views]


class RecoveryContract(Contract):
    """Guarantees of `snapshot`, `restore` and `restore_keys`."""

    @pytest.fixture
    async def here(self, harness: EngineHarness) -> Rig:
        """The queue where jobs are submitted."""
        return await Rig.on(harness, ledger=True)

    @pytest.fixture
    async def there(self, here: Rig) -> Rig:
        """The queue into which they are restored."""
        await open_queue(here.engine, OTHER_QUEUE)
        return Rig(here.harness, here.engine, OTHER_QUEUE)

    # Snapshots -------------------------------------------------------------------------------------

    async def test_a_snapshot_has_the_unknown_jobs_and_the_end_of_the_feed(self, rig: Rig) -> None:
        before = await rig.engine.now_ms()
        empty = await rig.engine.snapshot(rig.queue, ["a"])
        assert (empty.unknown, empty.position, empty.nonce) == (["a"], "", "")
        one, two = await rig.submit(2, delay_ms=1_000)
        await rig.succeed(await rig.start_one())
        snapshot = await rig.engine.snapshot(rig.queue, ["b", one, "a", two])
        last = (await rig.entries())[-1]
        assert (snapshot.unknown, snapshot.position, snapshot.nonce) == (["b", "a"], last.position, last.nonce)
        assert before <= empty.at_ms <= snapshot.at_ms <= await rig.engine.now_ms()
        assert (await rig.engine.snapshot(rig.queue, [])).unknown == []

    async def test_a_finished_job_is_known(self, here: Rig) -> None:
        made = [(await here.put_in(state))[0] for state in sorted(FINAL)]
        assert (await here.engine.snapshot(here.queue, made)).unknown == []

    # Restored states -------------------------------------------------------------------------------

    @pytest.mark.parametrize("state", OPEN)
    async def test_a_job_is_restored_in_its_state(self, here: Rig, there: Rig, state: State) -> None:
        job_id, _ = await here.put_in(state, **FIELDS, meta=META)
        view = await here.view(job_id)
        snapshot = await there.engine.snapshot(there.queue, [job_id])
        assert await there.engine.restore(there.queue, snapshot, lost(view)) == [True]
        to = State.QUEUED if state is State.RUNNING else state
        expected = msgspec.structs.replace(view, queue=OTHER_QUEUE, state=to, worker="")
        assert await there.view(job_id) == expected
        (event,) = await there.events(job_id)
        assert (event.type, event.from_state, event.to_state) == (RESTORED_EVENT, state, to)
        assert (event.attempt, event.retry_count) == (view.attempt, view.meta.retry_count)
        assert (event.tenant_id, event.worker) == ("acme", "")
        assert (event.data or {}).get("next_attempt_at_ms", 0) == view.next_attempt_at_ms
        stats = await there.engine.stats(there.queue)
        assert sum(stats.states.values()) == 1
        assert stats.states.get(to) == 1 or state is State.DLQ_RECORDED

    @pytest.mark.parametrize("state", [State.QUEUED, State.RUNNING])
    async def test_a_restored_job_can_be_claimed_at_once(self, here: Rig, there: Rig, state: State) -> None:
        job_id, _ = await here.put_in(state, **FIELDS, meta=META)
        view = await here.view(job_id)
        await self._restore(there, view)
        claim = await there.claim_one("w9")
        assert (claim.job_id, claim.attempt) == (job_id, view.attempt + 1)
        assert (claim.tenant_id, claim.idempotency_key, claim.trace_id) == ("acme", "k", "t")
        assert (claim.payload, claim.created_at_ms, claim.meta) == (view.payload, view.created_at_ms, view.meta)
        assert await there.succeed(claim) == ["applied"]

    async def test_a_restored_retry_waits_until_it_is_due(self, here: Rig, there: Rig) -> None:
        job_id, _ = await here.put_in(State.RETRYING, **FIELDS)
        await self._restore(there, await here.view(job_id))
        assert await there.claim_due() == []
        await there.harness.advance(60_001)
        (claim,) = await there.claim_due()
        assert (claim.job_id, claim.attempt, claim.meta.retry_count) == (job_id, 2, 1)
        assert [past.failure for past in claim.meta.history] == [FAILURE]
        claimed = (await there.events(job_id))[-1]
        assert (claimed.from_state, claimed.attempt, claimed.retry_count) == (State.RETRYING, 2, 1)

    @pytest.mark.parametrize("delay_ms", [1, 60_000], ids=["due", "later"])
    async def test_a_restored_delayed_job_waits_until_it_is_due(self, here: Rig, there: Rig, delay_ms: int) -> None:
        job_id = await here.submit_one(delay_ms=delay_ms)
        view = await here.view(job_id)
        await here.harness.advance(2)
        # The engine's clock has advanced; the ledger's instants are unchanged.
        now = await there.engine.now_ms()
        due = now - 1 if delay_ms == 1 else view.next_attempt_at_ms
        await self._restore(there, msgspec.structs.replace(view, next_attempt_at_ms=due))
        if delay_ms > 1:
            assert await there.claim_due() == []
            assert (await there.engine.stats(there.queue)).delayed == 1
            assert (await there.engine.promote([there.queue], 10)).next_due_at_ms == due
            await there.harness.advance(60_001)
        assert ids(await there.claim_due()) == [job_id]

    async def test_a_restored_job_continues_to_sleep(self, here: Rig, there: Rig) -> None:
        claim = await here.start_one()
        await here.settle(claim, Release("zzz", 60_000, started=True))
        await self._restore(there, await here.view(claim.job_id))
        assert await there.claim_due() == []
        await there.harness.advance(60_001)
        (again,) = await there.claim_due()
        assert (again.job_id, again.attempt) == (claim.job_id, 2)

    async def test_restored_parked_jobs_still_wait_for_an_operator(self, here: Rig, there: Rig) -> None:
        held = await here.submit_one(hold=True, delay_ms=60_000)
        parked, _ = await here.put_in(State.SUSPENDED)
        view = await here.view(held)
        meta = msgspec.structs.replace(view.meta, run_at_ms=await here.engine.now_ms() + 60_000)
        await self._restore(there, msgspec.structs.replace(view, meta=meta), await here.view(parked))
        assert await there.claim_due() == []
        assert await there.move(held, State.QUEUED) is State.WAITING_APPROVAL
        assert await there.claim_due() == []
        assert await there.move(parked, State.QUEUED) is State.SUSPENDED
        claims = await there.claim_due()
        assert ids(claims) == [parked]
        await there.succeed(*claims)
        await there.harness.advance(60_001)
        assert ids(await there.claim_due()) == [held]

    @pytest.mark.parametrize("state", [State.DLQ_PENDING, State.DLQ_RECORDED])
    async def test_a_restored_dead_letter_can_be_recorded_and_failed(self, here: Rig, there: Rig, state: State) -> None:
        job_id, _ = await here.put_in(state)
        view = await here.view(job_id)
        await self._restore(there, view)
        if state is State.DLQ_PENDING:
            await there.move(job_id, State.DLQ_RECORDED)
        assert await there.move(job_id, State.FAILED) is State.DLQ_RECORDED
        ended = await there.view(job_id)
        assert (ended.failure, ended.meta.dlq_id) == (FAILURE, view.meta.dlq_id)

    async def test_a_finished_job_is_never_restored(self, here: Rig, there: Rig) -> None:
        for state in sorted(FINAL):
            ended, opened = await here.view((await here.put_in(state))[0]), await here.view(await here.submit_one())
            snapshot = await there.engine.snapshot(there.queue, [])
            with pytest.raises(InvalidOption):
                await there.engine.restore(there.queue, snapshot, lost(opened, ended))
            await here.succeed(*await here.claim())
        assert await there.entries() == []
        assert await there.open_jobs() == 0

    # Only lost jobs --------------------------------------------------------------------------------

    async def test_restore_does_not_change_a_known_job(self, here: Rig, there: Rig) -> None:
        views = [await here.view(job_id) for job_id in await here.submit(3)]
        await self._restore(there, views[1])
        await there.settle(await there.claim_one(), RetryLater(60_000, FAILURE))
        before = await there.view(views[1].job_id)
        snapshot = await there.engine.snapshot(there.queue, [view.job_id for view in views])
        assert snapshot.unknown == [views[0].job_id, views[2].job_id]
        assert await there.engine.restore(there.queue, snapshot, lost(*views)) == [True, False, True]
        entries = await there.entries()
        assert await there.engine.restore(there.queue, snapshot, lost(*views)) == [False] * 3
        assert await there.view(views[1].job_id) == before
        assert await there.entries() == entries
        assert [event.job_id for event in entries[-1].events] == [views[0].job_id, views[2].job_id]
        assert sorted(ids(await there.claim_due())) == sorted([views[0].job_id, views[2].job_id])

    async def test_a_job_that_finished_after_the_snapshot_stays_finished(self, here: Rig, there: Rig) -> None:
        view = await here.view(await here.submit_one())
        snapshot = await there.engine.snapshot(there.queue, [view.job_id])
        await there.engine.submit([there.envelope(job_id=view.job_id)])
        await there.succeed(await there.claim_one())
        entry = (await there.entries())[0]
        snapshot = msgspec.structs.replace(snapshot, position=entry.position, nonce=entry.nonce)
        assert await there.engine.restore(there.queue, snapshot, lost(view)) == [False]
        assert await there.state(view.job_id) is State.SUCCEEDED

    async def test_nothing_is_restored_into_another_feed(self, here: Rig, there: Rig) -> None:
        view = await here.view(await here.submit_one())
        empty = await there.engine.snapshot(there.queue, [view.job_id])
        await there.submit_one(delay_ms=60_000)
        snapshot = await there.engine.snapshot(there.queue, [view.job_id])
        elsewhere = await here.engine.snapshot(here.queue, [view.job_id])
        other_nonce = msgspec.structs.replace(snapshot, nonce="0" * 12)
        for wrong in (empty, elsewhere, other_nonce, EngineSnapshot([], "1", snapshot.nonce, snapshot.at_ms)):
            assert await there.engine.restore(there.queue, wrong, lost(view)) == [False]
        assert await there.find(view.job_id) is None
        assert len(await there.entries()) == 1
        # Entries written since the snapshot are not a fork.
        await there.submit_one(delay_ms=60_000)
        assert await there.engine.restore(there.queue, snapshot, lost(view)) == [True]

    async def test_a_large_batch_is_restored_into_an_empty_feed(self, here: Rig, there: Rig) -> None:
        made = await here.submit(1_100)
        views = [view for view in await here.engine.get(here.queue, made) if view]
        snapshot = await there.engine.snapshot(there.queue, made[:1])
        assert await there.engine.restore(there.queue, snapshot, lost(*views)) == [True] * 1_100
        assert [event.job_id for event in await there.events()] == made
        assert (await there.engine.stats(there.queue)).states[State.QUEUED] == 1_100

    async def test_a_restored_queue_is_known(self, here: Rig, there: Rig) -> None:
        view = await here.view(await here.submit_one())
        await self._restore(there, view)
        assert await there.engine.queues() == sorted([OTHER_QUEUE, here.queue])

    # Keys ------------------------------------------------------------------------------------------

    async def test_a_restored_job_keeps_its_key(self, here: Rig, there: Rig) -> None:
        job_id, _ = await here.put_in(State.QUEUED, **FIELDS)
        await self._restore(there, await here.view(job_id))
        window_ms = there.engine.options.idempotency_window_ms
        await there.harness.advance(2 * window_ms)
        assert await self._first(there, tenant_id="acme") == (job_id, True)

    async def test_a_restored_key_stays_with_its_open_job(self, here: Rig, there: Rig) -> None:
        job_id, _ = await here.put_in(State.QUEUED, **FIELDS)
        now = await there.engine.now_ms()
        await there.engine.restore_keys(there.queue, [SubmissionKey("acme", "k", job_id, now + 60_000)])
        await self._restore(there, await here.view(job_id))
        await there.harness.advance(60_001)
        assert await self._first(there, tenant_id="acme") == (job_id, True)

    async def test_a_restored_key_has_the_window_of_its_job(self, here: Rig, there: Rig) -> None:
        job_id, _ = await here.put_in(State.QUEUED, **FIELDS | {"meta": Meta(key_window_ms=60_000)})
        now = await there.engine.now_ms()
        # Keys of open jobs are restored for a long time: when the jobs will be restored is not known.
        await there.engine.restore_keys(there.queue, [SubmissionKey("acme", "k", job_id, now + 600_000)])
        await self._restore(there, await here.view(job_id))
        await there.harness.advance(60_001)
        assert await self._first(there, tenant_id="acme") == (job_id, True)
        (claim,) = await there.claim_due()
        await there.succeed(claim)
        await there.harness.advance(60_001)
        assert (await self._first(there, tenant_id="acme"))[1] is False

    async def test_a_key_in_use_by_a_newer_job_stays_with_it(self, here: Rig, there: Rig) -> None:
        job_id, _ = await here.put_in(State.QUEUED, **FIELDS)
        newer = await there.submit_one(tenant_id="acme", idempotency_key="k", delay_ms=60_000)
        await self._restore(there, await here.view(job_id))
        assert await self._first(there, tenant_id="acme") == (newer, True)
        assert ids(await there.claim_due()) == [job_id]

    async def test_restored_keys_are_known_until_they_expire(self, rig: Rig) -> None:
        now = await rig.engine.now_ms()
        known = [
            SubmissionKey("default", "k", "first", now + 60_000),
            SubmissionKey("acme", "k", "theirs", now + 120_000),
            SubmissionKey("default", "old", "gone", now - 1),
        ]
        await rig.engine.restore_keys(rig.queue, known)
        await rig.engine.restore_keys(rig.queue, [SubmissionKey("default", "k", "second", now + 120_000)])
        await rig.engine.restore_keys(rig.queue, [])
        assert await self._first(rig) == ("first", True)
        assert await self._first(rig, tenant_id="acme") == ("theirs", True)
        assert (await self._first(rig, key="old"))[1] is False
        assert (await self._first(rig, queue=OTHER_QUEUE))[1] is False
        assert await rig.engine.get(rig.queue, ["first", "theirs"]) == [None, None]
        await rig.harness.advance(60_001)
        assert (await self._first(rig))[1] is False
        assert await self._first(rig, tenant_id="acme") == ("theirs", True)

    async def test_restoring_keys_does_not_change_a_known_key(self, rig: Rig) -> None:
        job_id = await rig.submit_one(idempotency_key="k")
        now = await rig.engine.now_ms()
        await rig.engine.restore_keys(rig.queue, [SubmissionKey("default", "k", "other", now + 1_000)])
        await rig.harness.advance(2_000)
        assert await self._first(rig) == (job_id, True)

    async def _restore(self, rig: Rig, *views: JobInfo) -> None:
        snapshot = await rig.engine.snapshot(rig.queue, [view.job_id for view in views])
        assert await rig.engine.restore(rig.queue, snapshot, lost(*views)) == [True] * len(views)

    async def _first(self, rig: Rig, key: str = "k", **fields: Any) -> tuple[str, bool]:
        """Submit with this key; return the job that has it and whether the key was known."""
        (receipt,) = await rig.engine.submit([rig.envelope(idempotency_key=key, **fields)])
        return receipt.job_id, receipt.duplicate
