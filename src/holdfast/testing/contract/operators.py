"""Engine contract for operators: moves, cancellation, controls and notices (S1, S2, A2, D6, H5)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from holdfast.core.history import check_history
from holdfast.core.job import Lease
from holdfast.core.states import OPERATOR_TARGETS, State, is_legal
from holdfast.core.verdict import Release, RetryLater, SettleResult, Suspend
from holdfast.engine.port import Engine
from holdfast.engine.port.operators import QueueControl
from holdfast.engine.port.reads import CancelledNotice, ControlNotice, DueNotice, Notice
from holdfast.errors import TransitionInvalid, UnknownJob
from holdfast.testing.contract.harness import FAILURE, LONG_WAIT_MS, Contract, EngineHarness, Rig, ids, soon


class MoveContract(Contract):
    """Guarantees of `move`."""

    @pytest.mark.parametrize("state", list(State))
    async def test_every_move_is_made_or_refused_as_the_table_says(self, harness: EngineHarness, state: State) -> None:
        rig = await Rig.on(harness, ledger=True)
        for target in State:
            job_id, claim = await rig.put_in(state)
            if target in OPERATOR_TARGETS and is_legal(state, target):
                await self._expect_moved(rig, job_id, state, target)
                if claim is not None:
                    assert await rig.succeed(claim) != [SettleResult.APPLIED]
            else:
                await self._expect_refused(rig, job_id, state, target)
            await rig.succeed(*await rig.claim())
        check_history(await rig.events())

    async def _expect_moved(self, rig: Rig, job_id: str, state: State, target: State) -> None:
        assert await rig.move(job_id, target, actor="ann", reason="as agreed") is state
        assert await rig.state(job_id) is target
        event = (await rig.events(job_id))[-1]
        assert (event.from_state, event.to_state) == (state, target)
        assert "as agreed" in event.message
        assert b"ann" in msgspec.json.encode(event)

    async def _expect_refused(self, rig: Rig, job_id: str, state: State, target: State) -> None:
        before, refused = (await rig.view(job_id), await rig.events(job_id)), rig.engine.counters.illegal_moves
        with pytest.raises(TransitionInvalid) as error:
            await rig.move(job_id, target)
        assert (error.value.job_id, error.value.from_state, error.value.to_state) == (job_id, state, target)
        assert error.value.code == "WF_STATE_TRANSITION_INVALID"
        assert rig.engine.counters.illegal_moves == refused + 1
        assert (await rig.view(job_id), await rig.events(job_id)) == before

    async def test_a_move_requires_the_expected_state(self, rig: Rig) -> None:
        job_id = await rig.submit_one()
        with pytest.raises(TransitionInvalid):
            await rig.move(job_id, State.CANCELLED, expected=State.RETRYING)
        assert await rig.state(job_id) is State.QUEUED
        assert await rig.move(job_id, State.CANCELLED, expected=State.QUEUED) is State.QUEUED

    async def test_moving_an_unknown_job_is_an_error(self, rig: Rig) -> None:
        with pytest.raises(UnknownJob):
            await rig.move("never-submitted", State.CANCELLED)
        await rig.submit_one()
        with pytest.raises(UnknownJob):
            await rig.engine.move("emails", "never-submitted", State.CANCELLED, actor="ann", reason="")

    # Cancelling ------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "fields", [{}, {"delay_ms": 1_000}, {"hold": True}], ids=["queued", "delayed", "waiting_approval"]
    )
    async def test_a_cancelled_job_never_runs(self, rig: Rig, fields: dict[str, Any]) -> None:
        job_id = await rig.submit_one(**fields)
        await rig.move(job_id, State.CANCELLED, reason="typo")
        await rig.lose_leases()
        assert await rig.claim_due() == []
        view = await rig.view(job_id)
        assert view.state is State.CANCELLED
        assert view.finished_at_ms >= view.created_at_ms
        assert await rig.open_jobs() == 0
        check_history(await rig.events(), ended=True)

    async def test_cancelling_a_running_job_fences_its_worker(self, rig: Rig) -> None:
        claim, other = await rig.start_one("w1"), await rig.start_one("w1")
        assert await rig.move(claim.job_id, State.CANCELLED) is State.RUNNING
        assert await rig.engine.renew([claim.lease, other.lease]) == [claim.lease]
        assert await rig.succeed(claim, other) == [SettleResult.STALE, SettleResult.APPLIED]
        await rig.lose_leases()
        assert await rig.claim_due() == []
        assert (await rig.event_types(claim.job_id))[-1] == "task.cancelled"
        assert await rig.open_jobs() == 0
        check_history(await rig.events(), ended=True)

    async def test_a_cancel_and_a_settle_cannot_both_win(self, rig: Rig) -> None:
        claims = [await rig.start_one() for _ in range(10)]

        async def cancel(job_id: str) -> bool:
            try:
                await rig.move(job_id, State.CANCELLED)
            except TransitionInvalid:
                return False
            return True

        for claim in claims:
            cancelled, (answer,) = await asyncio.gather(cancel(claim.job_id), rig.succeed(claim))
            assert cancelled is (answer is SettleResult.STALE)
            assert await rig.state(claim.job_id) is (State.CANCELLED if cancelled else State.SUCCEEDED)
        check_history(await rig.events(), ended=True)

    @pytest.mark.parametrize("to", [State.CANCELLED, State.SUSPENDED, State.DLQ_PENDING])
    async def test_concurrent_moves_and_claims_leave_a_legal_history(self, rig: Rig, to: State) -> None:
        other = Rig(rig.harness, await rig.harness.make())
        for _ in range(40):
            job_id = await rig.submit_one()
            came_from, claims = await asyncio.gather(rig.move(job_id, to), other.claim(limit=1))
            # The move takes effect either way: if the job was claimed first, its worker is fenced.
            assert came_from is (State.RUNNING if claims else State.QUEUED)
            assert await other.succeed(*claims) == [SettleResult.STALE] * len(claims)
        check_history(await rig.events())

    async def test_a_running_job_can_be_requeued(self, rig: Rig) -> None:
        claim = await rig.start_one("w1")
        assert await rig.move(claim.job_id, State.QUEUED) is State.RUNNING
        again = await rig.claim_one("w2")
        assert again.job_id == claim.job_id
        assert await rig.succeed(claim) == [SettleResult.STALE]
        assert await rig.succeed(again) == [SettleResult.APPLIED]
        check_history(await rig.events(), ended=True)

    async def test_without_a_ledger_a_job_dead_lettered_by_an_operator_fails(self, rig: Rig) -> None:
        job_id = await rig.submit_one()
        assert await rig.move(job_id, State.DLQ_PENDING, reason="never again") is State.QUEUED
        assert await rig.state(job_id) is State.FAILED
        assert await rig.claim_due() == []
        assert await rig.event_types(job_id) == ["task.created", "task.dlq_pending", "task.dlq", "task.failed"]
        assert (await rig.engine.stats(rig.queue)).dead_letters == 1

    async def test_a_queued_job_can_be_parked_and_resumed(self, rig: Rig) -> None:
        for park in (State.SUSPENDED, State.WAITING_APPROVAL):
            job_id = await rig.submit_one()
            await rig.move(job_id, park)
            assert await rig.claim_due() == []
            await rig.move(job_id, State.QUEUED)
            (claim,) = await rig.claim_due()
            assert (claim.job_id, claim.attempt) == (job_id, 1)
            await rig.succeed(claim)

    async def test_a_cancelled_job_has_actor_and_reason(self, rig: Rig) -> None:
        job_id = await rig.submit_one()
        await rig.engine.move(rig.queue, job_id, State.CANCELLED, actor="ada", reason="wrong month")
        view = await rig.view(job_id)
        assert view.failure is not None
        assert view.failure.code == "CANCELLED"
        assert "ada" in view.failure.message
        assert "wrong month" in view.failure.message

    async def test_resuming_a_job_resets_its_counters(self, rig: Rig) -> None:
        await rig.start_one("w1")
        await rig.lose_leases()
        claim = await rig.reclaim_one("w2")
        await rig.settle(claim, Suspend(FAILURE))
        await rig.move(claim.job_id, State.QUEUED)
        again = await rig.claim_one("w3")
        lost = again.meta.lost_leases + again.lease.deliveries - 1
        assert (again.meta.retry_count, lost, again.attempt) == (0, 0, 3)
        assert len(again.meta.history) == 1

    async def test_a_sleeping_job_that_was_parked_continues_to_sleep(self, rig: Rig) -> None:
        claim = await rig.start_one()
        await rig.settle(claim, Release("sleeps", 60_000, started=True))
        await rig.move(claim.job_id, State.SUSPENDED)
        await rig.move(claim.job_id, State.QUEUED)
        assert await rig.claim_due() == []
        await rig.harness.advance(60_001)
        assert ids(await rig.claim_due()) == [claim.job_id]


class ControlContract(Contract):
    """Guarantees of `get_control`, `set_control` and `listen`."""

    async def test_controls_are_kept(self, rig: Rig) -> None:
        assert await rig.engine.get_control(rig.queue) == QueueControl()
        control = QueueControl(paused=True, intake_paused=True, concurrency=3)
        await rig.engine.set_control(rig.queue, control)
        other = await rig.harness.make()
        assert await other.get_control(rig.queue) == control
        assert await other.get_control("emails") == QueueControl()
        await other.set_control(rig.queue, QueueControl())
        assert await rig.engine.get_control(rig.queue) == QueueControl()

    async def test_a_paused_queue_holds_back_due_jobs(self, rig: Rig) -> None:
        job_id = await rig.submit_one(delay_ms=1_000)
        await rig.engine.set_control(rig.queue, QueueControl(paused=True))
        await rig.harness.advance(1_001)
        await rig.promote()
        assert await rig.claim() == []
        await rig.engine.set_control(rig.queue, QueueControl())
        assert ids(await rig.claim_due()) == [job_id]

    async def test_no_expired_lease_of_a_paused_queue_is_offered(self, rig: Rig) -> None:
        await rig.start_one()
        await rig.lose_leases()
        await rig.engine.set_control(rig.queue, QueueControl(paused=True))

        def only(lease: Lease) -> bool:
            raise AssertionError(f"{lease} was offered")

        assert await rig.engine.reclaim("w2", [rig.queue], 1, only) == []

    async def test_expired_leases_of_a_paused_queue_are_reclaimed_after_it_is_resumed(self, rig: Rig) -> None:
        claim = await rig.start_one("w1")
        await rig.engine.set_control(rig.queue, QueueControl(paused=True))
        await rig.lose_leases()
        assert await rig.engine.reclaim("w2", [rig.queue], 10) == []
        await rig.engine.set_control(rig.queue, QueueControl())
        assert ids(await rig.engine.reclaim("w2", [rig.queue], 10)) == [claim.job_id]

    async def test_listeners_are_notified_of_a_cancelled_run(self, rig: Rig) -> None:
        listener = await self._listener(rig)
        claim = await rig.start_one()
        await rig.move(claim.job_id, State.CANCELLED)
        await self._expect_notice(rig, listener, CancelledNotice(rig.queue, claim.job_id))

    async def test_listeners_are_notified_of_a_control_change(self, rig: Rig) -> None:
        listener = await self._listener(rig)
        await rig.engine.set_control(rig.queue, QueueControl(concurrency=2))
        await self._expect_notice(rig, listener, ControlNotice(rig.queue))

    async def test_listeners_are_notified_of_an_earlier_due_time(self, rig: Rig) -> None:
        listener = await self._listener(rig)
        due_at_ms = await rig.engine.now_ms() + 60_000
        await rig.submit(run_at_ms=due_at_ms)
        await self._expect_notice(rig, listener, DueNotice(rig.queue, due_at_ms))
        claim = await rig.start_one()
        await rig.settle(claim, RetryLater(1_000, FAILURE))
        while True:
            notices = await soon(listener.listen([rig.queue], LONG_WAIT_MS))
            assert notices, "no notice of the earlier due time"
            if any(isinstance(notice, DueNotice) and notice.at_ms < due_at_ms for notice in notices):
                break

    async def test_listen_times_out(self, rig: Rig) -> None:
        await rig.engine.listen([rig.queue], 0)
        assert await soon(rig.engine.listen([rig.queue], 20)) == []

    async def _listener(self, rig: Rig) -> Engine:
        listener = await rig.harness.make()
        await listener.listen([rig.queue], 0)
        return listener

    async def _expect_notice(self, rig: Rig, listener: Engine, expected: Notice) -> None:
        while True:
            notices = await soon(listener.listen([rig.queue], LONG_WAIT_MS))
            assert notices, f"{expected} was not received"
            if expected in notices:
                return
