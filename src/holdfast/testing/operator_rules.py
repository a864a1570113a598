"""Operator rules of `state_machine.EngineMachine`: decide, expedite, claim one job, limit a tenant or the queue."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from holdfast.core.job import Approval, ApprovalRequest, Claim
from holdfast.core.states import State
from holdfast.engine.port import Engine
from holdfast.engine.port.operators import QueueControl, TenantControl
from holdfast.errors import ConcurrencyLimited, TransitionInvalid
from holdfast.testing.model import Model

T = TypeVar("T")

TENANTS: Final = ("acme", "zeta")
#: One approval request of a guard and one of a task.
REQUESTS: Final = (
    ApprovalRequest("guard-1", "ab12"),
    ApprovalRequest("own-1", "cd34", name="send it?", details={"sum": 3}),
)

_picks = st.integers(0, 11)


class OperatorRules(RuleBasedStateMachine):
    """Mixin of `EngineMachine`, which implements the members declared here."""

    engine: Engine
    model: Model
    queue: str

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    def _incarnation(self, worker: str) -> str:
        raise NotImplementedError

    def _receive(self, worker: str, claims: list[Claim], lost: bool) -> None:
        raise NotImplementedError

    @rule(pick=_picks, decision=st.sampled_from(("approved", "approved", "rejected", "expired", "withdrawn", "late")))
    def decide(self, pick: int, decision: str) -> None:
        """Decide about a job that waits for approval; `late` approves a request that is void."""
        waiting = [job for job in self.model.jobs.values() if job.state is State.WAITING_APPROVAL]
        if not waiting:
            return
        job = waiting[pick % len(waiting)]
        approval, event = None, f"approval.{decision}"
        if decision in ("approved", "late"):
            approval_id = (
                job.approval_request.approval_id if job.approval_request and decision == "approved" else "void-1"
            )
            approval, event = Approval(approval_id, ("bob",), 1_000, "fine"), "approval.approved"
        to = State.CANCELLED if decision in ("rejected", "expired") else State.QUEUED
        came_from = self._run(
            self.engine.move(
                self.queue,
                job.job_id,
                to,
                actor="ann",
                reason="decided",
                event=event,
                approval=approval,
                expected=State.WAITING_APPROVAL,
                audit="operator.approve",
            )
        )
        assert came_from is self.model.move(job.job_id, to, approval)

    @rule(pick=_picks)
    def expedite(self, pick: int) -> None:
        job = list(self.model.jobs.values())[pick % len(self.model.jobs)]
        try:
            self._run(self.engine.expedite(self.queue, job.job_id, actor="ann", reason="now"))
        except TransitionInvalid:
            assert job.due_at is None or job.may_be_ready
        else:
            self.model.expedite(job)

    @rule(pick=_picks, worker=st.sampled_from(("a", "b", "c")), lost=st.booleans())
    def claim_job(self, pick: int, worker: str, lost: bool) -> None:
        job = list(self.model.jobs.values())[pick % len(self.model.jobs)]
        legal, slots = job.state in (State.QUEUED, State.RETRYING), self.model.free_slots_in_queue()
        try:
            claim = self._run(self.engine.claim_job(self._incarnation(worker), self.queue, job.job_id))
        except TransitionInvalid:
            assert not legal
        except ConcurrencyLimited:
            assert legal
            assert slots == 0
        else:
            assert legal
            assert slots > 0
            assert claim.job_id == job.job_id
            self.model.start(claim)
            self._receive(worker, [claim], lost)

    @rule(tenant=st.sampled_from(TENANTS), concurrency=st.sampled_from((None, None, 0, 1, 2)))
    def limit_tenant(self, tenant: str, concurrency: int | None) -> None:
        self.model.limits[tenant] = concurrency
        self.set_limits()

    @rule(concurrency=st.sampled_from((None, None, 0, 1, 2, 3)))
    def limit_queue(self, concurrency: int | None) -> None:
        self.model.concurrency = concurrency
        self.set_limits()

    @rule()
    def check_stats(self) -> None:
        """Compare the backlog within bounds: which due jobs an engine has promoted is its choice."""
        stats = self._run(self.engine.stats(self.queue))
        least, most = self.model.backlog()
        assert least <= stats.backlog <= most, stats
        assert sum(stats.tenants.values()) == stats.backlog
        leased = sum(job.lease is not None for job in self.model.jobs.values())
        assert stats.pending == leased + len(self.model.waiting(in_pending=True))

    def set_limits(self) -> None:
        tenants = {
            tenant: TenantControl(concurrency=limit, weight=2)
            for tenant, limit in self.model.limits.items()
            if limit is not None
        }
        self._run(
            self.engine.set_control(self.queue, QueueControl(concurrency=self.model.concurrency, tenants=tenants))
        )
