"""Engine contract for queue controls, approvals and operator reads (A1–A3, H5, H6)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

import msgspec
import pytest

from holdfast.core.history import check_history
from holdfast.core.job import Approval, ApprovalRequest, Event, Meta, Priority
from holdfast.core.states import State
from holdfast.core.verdict import Hold, RetryLater, SettleResult
from holdfast.engine.port.jobs import MAX_TENANTS, RetryVia
from holdfast.engine.port.operators import QueueControl, TenantControl
from holdfast.errors import ControlChanged, FeedFull, InvalidOption, TransitionInvalid
from holdfast.testing.contract.harness import FAILURE, OTHER_QUEUE, Contract, EngineHarness, Rig, both_modes, ids

REQUEST: Final = ApprovalRequest(
    approval_id="approval-1",
    payload_hash="ab" * 32,
    reason="more than 100 €",
    policies=("large-sums",),
    quorum=2,
    requested_by="ada",
    details={"sum": 120},
)
TASK_REQUEST: Final = msgspec.structs.replace(REQUEST, approval_id="approval-2", name="send it?")
TASK_APPROVAL: Final = Approval(approval_id="approval-2", by=("bob",), at_ms=1_700_000_000_000)
APPROVAL: Final = Approval(approval_id="approval-1", by=("bob", "cy"), at_ms=1_700_000_000_000, reason="fine")

MINUTE_MS: Final = 60_000


def operators(events: list[Event]) -> list[Event]:
    """Return the audit entries among the events."""
    return [event for event in events if event.type.startswith("operator.")]


def audit_fields(event: Event) -> tuple[Any, ...]:
    """Return the fields of an audit entry."""
    assert (event.from_state, event.to_state) == (None, None)
    data = event.data or {}
    return tuple(data[name] for name in ("actor", "reason", "before", "after", "target", "target_id"))


class QueueControlContract(Contract):
    """Guarantees of `set_control` in addition to `ControlContract`."""

    async def test_all_controls_are_kept(self, rig: Rig) -> None:
        tenants = {"acme": TenantControl(weight=3, concurrency=2, intake_limit=100), "zeta é": TenantControl()}
        control = QueueControl(
            paused=True,
            intake_paused=True,
            concurrency=3,
            worker_concurrency=4,
            intake_limit=0,
            backlog_alert=7,
            tenants=tenants,
        )
        await rig.engine.set_control(rig.queue, control)
        other = await rig.harness.make()
        assert await other.get_control(rig.queue) == control
        assert (await other.stats(rig.queue)).control == control
        await other.set_control(rig.queue, QueueControl(), expected=control)
        assert await rig.engine.get_control(rig.queue) == QueueControl()

    async def test_set_control_is_refused_if_the_expected_control_has_changed(self, rig: Rig) -> None:
        await rig.engine.set_control(rig.queue, QueueControl(intake_limit=5), expected=QueueControl())
        with pytest.raises(ControlChanged):
            await rig.engine.set_control(
                rig.queue,
                QueueControl(paused=True),
                expected=QueueControl(),
                actor="ann",
                reason="tired",
                audit="operator.pause",
            )
        assert await rig.engine.get_control(rig.queue) == QueueControl(intake_limit=5)
        assert operators(await rig.events()) == []
        await rig.engine.set_control(rig.queue, QueueControl(paused=True), expected=QueueControl(intake_limit=5))
        assert await rig.engine.get_control(rig.queue) == QueueControl(paused=True)

    async def test_one_of_several_concurrent_changes_wins(self, rig: Rig) -> None:
        engines = [rig.engine, await rig.harness.make()]

        async def change(number: int) -> bool:
            try:
                await engines[number % 2].set_control(
                    rig.queue, QueueControl(intake_limit=number), expected=QueueControl()
                )
            except ControlChanged:
                return False
            return True

        won = await asyncio.gather(*(change(number) for number in range(1, 7)))
        assert sum(won) == 1
        assert await rig.engine.get_control(rig.queue) == QueueControl(intake_limit=won.index(True) + 1)

    async def test_a_control_change_is_audited_with_actor_and_reason(self, rig: Rig) -> None:
        before = QueueControl(intake_limit=5)
        after = QueueControl(paused=True, tenants={"acme": TenantControl(weight=2)})
        await rig.engine.set_control(rig.queue, before)
        await rig.engine.set_control(
            rig.queue, after, expected=before, actor="ann", reason="a fire", audit="operator.pause"
        )
        (event,) = await rig.events()
        assert (event.type, event.job_id) == ("operator.pause", "")
        plain = [msgspec.to_builtins(control) for control in (before, after)]
        assert audit_fields(event) == ("ann", "a fire", *plain, "queue", rig.queue)
        assert event.at_ms <= await rig.engine.now_ms()

    @pytest.mark.parametrize(
        "control",
        [
            QueueControl(tenants={f"t{number}": TenantControl() for number in range(MAX_TENANTS + 1)}),
            QueueControl(tenants={"acme": TenantControl(weight=0)}),
            QueueControl(tenants={"acme": TenantControl(concurrency=-1)}),
            QueueControl(intake_limit=-1),
        ],
        ids=["too many tenants", "no weight", "negative concurrency", "negative limit"],
    )
    async def test_invalid_controls_are_refused(self, rig: Rig, control: QueueControl) -> None:
        with pytest.raises(InvalidOption):
            await rig.engine.set_control(rig.queue, control)
        assert await rig.engine.get_control(rig.queue) == QueueControl()

    async def test_up_to_max_tenants_can_have_controls(self, rig: Rig) -> None:
        control = QueueControl(tenants={f"t{number}": TenantControl(weight=2) for number in range(MAX_TENANTS)})
        await rig.engine.set_control(rig.queue, control)
        assert await rig.engine.get_control(rig.queue) == control
        submitted = await rig.submit(3, tenant_id="another tenant")
        assert ids(await rig.claim()) == submitted


class ApprovalContract(Contract):
    """Guarantees for approval requests, decisions and audited moves."""

    async def test_an_approval_request_at_submission_is_in_the_event_and_the_job(self, rig: Rig) -> None:
        job_id = await rig.submit_one(hold=True, meta=Meta(approval_request=REQUEST))
        view = await rig.view(job_id)
        assert (view.state, view.meta.approval_request) == (State.WAITING_APPROVAL, REQUEST)
        (event,) = await rig.events(job_id)
        assert (event.type, event.to_state) == ("approval.requested", State.WAITING_APPROVAL)
        assert self._meta(event).approval_request == REQUEST
        assert await rig.claim_due() == []

    async def test_an_approval_request_during_a_run_is_in_the_event_and_the_job(self, rig: Rig) -> None:
        claim = await rig.start_one()
        assert await rig.settle(claim, Hold("send it?", TASK_REQUEST)) is SettleResult.APPLIED
        view = await rig.view(claim.job_id)
        assert (view.state, view.meta.approval_request, view.worker) == (State.WAITING_APPROVAL, TASK_REQUEST, "")
        event = (await rig.events(claim.job_id))[-1]
        assert (event.type, event.from_state) == ("approval.requested", State.RUNNING)
        assert msgspec.convert((event.data or {})["approval_request"], ApprovalRequest) == TASK_REQUEST

    async def test_approving_a_guards_request_clears_the_payload_hash(self, rig: Rig) -> None:
        job_id = await rig.submit_one(hold=True, meta=Meta(approval_request=REQUEST, priority=Priority.LOW))
        await rig.move(job_id, State.QUEUED, approval=APPROVAL, event="approval.approved")
        claim = await rig.claim_one()
        assert claim.job_id == job_id
        assert claim.meta == Meta(approved_hash=REQUEST.payload_hash, priority=Priority.LOW)
        approved = (await rig.events(job_id))[1]
        assert approved.type == "approval.approved"
        assert msgspec.convert((approved.data or {})["approval"], Approval) == APPROVAL
        assert ((approved.data or {})["actor"], (approved.data or {})["reason"]) == ("ann", "because")

    async def test_an_approval_of_a_tasks_own_request_is_kept_by_name(self, rig: Rig) -> None:
        claim = await rig.start_one()
        await rig.settle(claim, Hold("send it?", TASK_REQUEST))
        await rig.move(claim.job_id, State.QUEUED, approval=TASK_APPROVAL)
        again = await rig.claim_one()
        assert (again.meta.approval_request, again.meta.approved_hash) == (None, "")
        assert again.meta.approvals == {"send it?": TASK_APPROVAL}
        # The approval is kept across retries.
        await rig.settle(again, RetryLater(1_000, FAILURE))
        await rig.harness.advance(1_001)
        (third,) = await rig.claim_due()
        assert third.meta.approvals == {"send it?": TASK_APPROVAL}

    @pytest.mark.parametrize("to", [State.QUEUED, State.CANCELLED])
    async def test_a_late_decision_does_not_answer_the_next_request(self, rig: Rig, to: State) -> None:
        job_id = await rig.submit_one(hold=True, meta=Meta(approval_request=REQUEST))
        late = {"expected": State.WAITING_APPROVAL, "approval_id": REQUEST.approval_id}
        await rig.move(job_id, State.QUEUED, approval=APPROVAL, **late)
        with pytest.raises(TransitionInvalid):
            await rig.move(job_id, to, **late)
        await rig.settle(await rig.claim_one(), Hold("send it?", TASK_REQUEST))
        with pytest.raises(TransitionInvalid):
            await rig.move(job_id, to, approval=APPROVAL if to is State.QUEUED else None, **late)
        view = await rig.view(job_id)
        assert (view.state, view.meta.approval_request) == (State.WAITING_APPROVAL, TASK_REQUEST)
        await rig.move(job_id, to, **{**late, "approval_id": TASK_REQUEST.approval_id})

    async def test_a_withdrawn_request_clears_nothing(self, rig: Rig) -> None:
        job_id = await rig.submit_one(hold=True, meta=Meta(approval_request=REQUEST))
        await rig.move(job_id, State.QUEUED, event="approval.withdrawn")
        claim = await rig.claim_one()
        assert (claim.meta.approval_request, claim.meta.approved_hash, claim.meta.approvals) == (None, "", None)
        assert (await rig.event_types(job_id))[:2] == ["approval.requested", "approval.withdrawn"]

    @pytest.mark.parametrize(
        ("event", "code"),
        [
            ("approval.rejected", "APPROVAL_REJECTED"),
            ("approval.expired", "APPROVAL_EXPIRED"),
            ("task.cancelled", "CANCELLED"),
            ("", "CANCELLED"),
        ],
    )
    async def test_a_rejected_or_expired_request_cancels_the_job_with_the_reason(
        self, rig: Rig, event: str, code: str
    ) -> None:
        job_id = await rig.submit_one(hold=True, meta=Meta(approval_request=REQUEST))
        assert await rig.move(job_id, State.CANCELLED, event=event, reason="too much") is State.WAITING_APPROVAL
        view = await rig.view(job_id)
        assert view.state is State.CANCELLED
        assert view.failure is not None
        assert view.failure.code == code
        assert "too much" in view.failure.message
        assert await rig.event_types(job_id) == ["approval.requested", event or "task.cancelled"]
        # The feed has the same failure: a separate ledger knows nothing else.
        data = (await rig.events())[-1].data or {}
        assert (data["code"], data["message"]) == (code, view.failure.message)
        assert await rig.claim_due() == []
        check_history(await rig.events(), ended=True)

    @pytest.mark.parametrize(
        ("state", "to", "event"),
        [
            (State.QUEUED, State.CANCELLED, "approval.rejected"),
            (State.WAITING_APPROVAL, State.CANCELLED, "approval.approved"),
            (State.WAITING_APPROVAL, State.QUEUED, "task.created"),
            (State.SUSPENDED, State.QUEUED, "approval.approved"),
        ],
    )
    async def test_a_move_refuses_an_event_that_does_not_belong_to_it(
        self, harness: EngineHarness, state: State, to: State, event: str
    ) -> None:
        rig = await Rig.on(harness, ledger=True)
        job_id, _ = await rig.put_in(state)
        before = await rig.entries()
        with pytest.raises(InvalidOption):
            await rig.move(job_id, to, event=event)
        assert await rig.state(job_id) is state
        assert await rig.entries() == before

    async def test_a_move_and_its_audit_entry_are_one_step(self, rig: Rig) -> None:
        job_id = await rig.submit_one(tenant_id="acme")
        await rig.move(job_id, State.SUSPENDED, audit="operator.suspend", reason="odd")
        last = (await rig.entries())[-1]
        moved, logged = sorted(last.events, key=lambda event: event.to_state is None)
        assert (moved.type, moved.to_state) == ("task.suspended", State.SUSPENDED)
        assert (logged.type, logged.job_id, logged.tenant_id) == ("operator.suspend", job_id, "acme")
        assert audit_fields(logged) == ("ann", "odd", "queued", "suspended", "job", job_id)
        check_history(await rig.events())

    async def test_a_refused_move_leaves_no_audit_entry(self, rig: Rig) -> None:
        job_id = await rig.submit_one()
        with pytest.raises(TransitionInvalid):
            await rig.move(job_id, State.FAILED, audit="operator.cancel")
        assert operators(await rig.events()) == []

    async def test_a_move_without_audit_leaves_no_audit_entry(self, rig: Rig) -> None:
        job_id = await rig.submit_one()
        await rig.move(job_id, State.CANCELLED)
        assert operators(await rig.events()) == []

    def _meta(self, event: Event) -> Meta:
        """Decode the envelope's `meta` in a creation event, which is text or an object."""
        meta = (event.data or {})["meta"]
        return msgspec.json.decode(meta, type=Meta) if isinstance(meta, str) else msgspec.convert(meta, Meta)


class OperatorReadContract(Contract):
    """What operators can read: workers, backlog, the tail of the feed."""

    async def test_workers_lists_workers_with_their_pending_jobs(self, rig: Rig) -> None:
        assert await rig.engine.workers([rig.queue]) == []
        await rig.submit(3)
        await rig.claim("w2", 2)
        before = await rig.engine.now_ms()
        await rig.harness.advance(10)
        (claim,) = await rig.claim("w1", 1)
        await rig.engine.claim("w1", [OTHER_QUEUE], 1, 0)
        listed = await rig.engine.workers([rig.queue, OTHER_QUEUE])
        assert [(each.worker, each.queue, each.pending) for each in listed] == [
            ("w1", OTHER_QUEUE, 0),
            ("w1", rig.queue, 1),
            ("w2", rig.queue, 2),
        ]
        now_ms = await rig.engine.now_ms()
        assert all(0 < each.seen_at_ms <= now_ms for each in listed)
        assert before <= now_ms
        await rig.succeed(claim)
        await rig.engine.deregister_worker("w1", [rig.queue])
        assert [(each.worker, each.pending) for each in await rig.engine.workers([rig.queue])] == [("w2", 2)]
        assert await rig.engine.workers([]) == []

    async def test_claim_job_registers_the_worker(self, rig: Rig) -> None:
        await rig.engine.claim_job("w9", rig.queue, await rig.submit_one())
        assert [(each.worker, each.pending) for each in await rig.engine.workers([rig.queue])] == [("w9", 1)]

    async def test_the_backlog_is_ready_and_running_jobs(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, ledger=True)
        stats = await rig.engine.stats(rig.queue)
        assert (stats.backlog, stats.pending, stats.tenants) == (0, 0, {})
        for state in State:
            if state is not State.QUEUED:
                await rig.put_in(state, tenant_id="zeta")
        await rig.submit(4, tenant_id="acme")
        await rig.submit(2, tenant_id="acme", delay_ms=MINUTE_MS)
        stats = await rig.engine.stats(rig.queue)
        assert (stats.backlog, stats.pending) == (5, 1)
        assert {tenant: count for tenant, count in stats.tenants.items() if count} == {"acme": 4, "zeta": 1}

    @both_modes
    async def test_retries_in_the_pending_list_are_pending(self, rig: Rig, mode: RetryVia) -> None:
        running, retrying = await rig.start_one(), await rig.start_one()
        await rig.settle(retrying, RetryLater(MINUTE_MS, FAILURE))
        assert (await rig.engine.stats(rig.queue)).pending == (2 if mode is RetryVia.PENDING else 1)
        await rig.succeed(running)
        assert (await rig.engine.stats(rig.queue)).pending == (1 if mode is RetryVia.PENDING else 0)

    async def test_some_entries_behind_the_reader_are_kept(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, feed_tail=3)
        await rig.engine.attach_reader(rig.queue)
        for _ in range(10):
            await rig.submit_one()
        whole = await rig.entries()
        await rig.engine.trim_feed(rig.queue, whole[8].position)
        assert await rig.entries() == whole[5:]
        await rig.engine.trim_feed(rig.queue, whole[9].position)
        assert await rig.entries() == whole[6:]
        assert await rig.engine.read_feed(rig.queue, whole[9].position, 10) == whole[9:]

    async def test_the_tail_does_not_count_towards_a_full_feed(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, feed_tail=100, feed_max_bytes=20_000)
        await rig.engine.attach_reader(rig.queue)
        payload = b'{"text":"' + b"x" * 500 + b'"}'
        for _ in range(5):
            await rig.submit(30, payload=payload)
            await rig.engine.trim_feed(rig.queue, (await rig.entries())[-1].position)
        assert len(await rig.entries()) == 5
        assert len(await rig.submit(1, payload=payload)) == 1

    async def test_a_fully_read_feed_keeps_little_more_than_its_tail(self, harness: EngineHarness) -> None:
        """At most a tenth more, however the reader reached the end."""
        rig = await Rig.on(harness, feed_tail=200)
        await rig.engine.attach_reader(rig.queue)
        for step in (1, 300, 7, 30, 19, 1, 100):
            await rig.submit(step)
            whole = await rig.entries()
            for entry in (whole[len(whole) // 4], whole[len(whole) // 2], whole[-1]):
                await rig.engine.trim_feed(rig.queue, entry.position)
            assert len(await rig.entries()) <= 220

    async def test_a_full_feed_accepts_submissions_once_it_has_been_read(self, harness: EngineHarness) -> None:
        """Also if the reader trims in steps and no entry is added in between."""
        rig = await Rig.on(harness, feed_tail=200, feed_max_bytes=100_000)
        await rig.engine.attach_reader(rig.queue)
        await rig.submit(1)
        await rig.engine.trim_feed(rig.queue, (await rig.entries())[-1].position)
        payload = b'{"text":"' + b"x" * 500 + b'"}'
        with suppress(FeedFull):
            for _ in range(1_000):
                await rig.submit(1, payload=payload)
        whole = await rig.entries()
        assert len(whole) < 1_000, "the feed was never full"
        for entry in (whole[1], whole[-1]):
            await rig.engine.trim_feed(rig.queue, entry.position)
        for _ in range(len(whole) // 2):
            await rig.submit(1, payload=payload)
