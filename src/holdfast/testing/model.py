"""A model of one queue in plain Python: what an engine should answer.

No batches, no storage; the clock is a number. `state_machine.py` drives an engine and this model with the same random
steps and compares them. Where the port leaves an engine a choice (for example which ready jobs a claim returns), the
model checks that the choice was allowed and follows it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, assert_never

from holdfast.core.fingerprint import is_key_reused, raw_fingerprint
from holdfast.core.job import Approval, ApprovalRequest, Claim, Envelope, KeyReuse, Lease, Receipt
from holdfast.core.states import FINAL, State, is_legal
from holdfast.core.verdict import (
    TARGETS,
    DeadLetter,
    Hold,
    Release,
    RetryLater,
    SettleResult,
    Succeed,
    Suspend,
    Verdict,
)
from holdfast.engine.outage_watch import OUTAGE_LEASES
from holdfast.engine.port.jobs import has_own_key
from holdfast.errors import IdempotencyKeyReused

#: Model time moves in whole units; all durations end on half a unit. A slow machine therefore never changes on which
#: side of a deadline a step falls.
UNIT_MS: Final = 1_000_000
VISIBILITY_MS: Final = 3 * UNIT_MS + UNIT_MS // 2
MAX_DELIVERIES: Final = 2


@dataclass(slots=True)
class ModelJob:
    """The expected state of one job."""

    envelope: Envelope
    state: State
    #: Attempts used up so far.
    attempt: int = 0
    retry_count: int = 0
    lost_leases: int = 0
    #: Of those, since it was last claimed from its queue.
    lost_since_claimed: int = 0
    #: The valid lease, while running.
    lease: Lease | None = None
    expires_at: int = 0
    #: When a waiting job may run.
    due_at: int | None = None
    #: Has a due time, but an engine may have made it ready: it was due at a claim, was expedited, or was requeued
    #: while it slept.
    may_be_ready: bool = False
    #: Requested by the submitter. Parking and resuming the job does not make it run earlier.
    run_at: int = 0
    #: Requested by the job itself on release.
    asleep_until: int = 0
    #: An operator moved it while it ran: whether that attempt and its lost leases count is the engine's choice.
    revoked: bool = False
    #: Token of the last applied settlement.
    settled: str = ""
    #: The open approval request, and what has been approved so far.
    approval_request: ApprovalRequest | None = None
    cleared: str = ""
    approvals: dict[str, Approval] = field(default_factory=dict)

    @property
    def job_id(self) -> str:
        return self.envelope.job_id

    @property
    def is_ready(self) -> bool:
        return self.state in (State.QUEUED, State.RETRYING) and self.due_at is None


@dataclass(slots=True)
class Model:
    """Model of one queue. Query it before the engine acts, then apply to it what the engine did."""

    ledger: bool
    pending: bool
    now: int = 0
    jobs: dict[str, ModelJob] = field(default_factory=dict)
    keys: dict[tuple[str, str], str] = field(default_factory=dict)
    #: Concurrency limit of each tenant, and of the whole queue.
    limits: dict[str, int | None] = field(default_factory=dict)
    concurrency: int | None = None
    #: Until when a lost lease may be due to an outage, and does not count.
    outage_until: int = 0

    # Submitting ------------------------------------------------------------------------------------

    def submit(self, envelope: Envelope) -> Receipt | IdempotencyKeyReused:
        key = (envelope.tenant_id, envelope.idempotency_key or envelope.job_id)
        if envelope.job_id in self.jobs:
            return Receipt(envelope.job_id)
        keyed = has_own_key(envelope)
        if keyed and key in self.keys:
            first = self.jobs[self.keys[key]].envelope
            requests = [raw_fingerprint(each.task, each.payload) for each in (first, envelope)]
            # A job that is known by its id has no fingerprint.
            reused = has_own_key(first) and is_key_reused(*requests)
            if reused and envelope.on_key_reuse is KeyReuse.REFUSE:
                return IdempotencyKeyReused(envelope.queue, envelope.idempotency_key, first.job_id)
            return Receipt(first.job_id, duplicate=True)
        state = State.WAITING_APPROVAL if envelope.hold else State.QUEUED
        job = ModelJob(
            envelope, state, run_at=self.now + envelope.delay_ms, approval_request=envelope.meta.approval_request
        )
        if envelope.delay_ms and not envelope.hold:
            job.due_at = job.run_at
        self.jobs[envelope.job_id] = job
        if keyed:
            self.keys[key] = envelope.job_id
        else:
            self.keys.setdefault(key, envelope.job_id)
        return Receipt(envelope.job_id)

    # Running ---------------------------------------------------------------------------------------

    def ready(self) -> set[str]:
        return {job.job_id for job in self.jobs.values() if job.is_ready}

    def claimable(self) -> set[str]:
        """Jobs that a claim may return: ready ones, and due ones that an engine may have made ready."""
        maybe_ready = {job.job_id for job in self.jobs.values() if job.may_be_ready}
        return self.ready() | self.due(in_pending=False) | maybe_ready

    def free_slots(self, tenant: str) -> int:
        """Count the free slots of a tenant."""
        limit = self.limits.get(tenant)
        if limit is None:
            return len(self.jobs)
        running = sum(job.lease is not None for job in self.jobs.values() if job.envelope.tenant_id == tenant)
        return max(0, limit - running)

    def free_slots_in_queue(self) -> int:
        """Count the free slots of the queue, over all tenants."""
        if self.concurrency is None:
            return len(self.jobs)
        return max(0, self.concurrency - sum(job.lease is not None for job in self.jobs.values()))

    def least(self, waiting: set[str]) -> int:
        """How many of these jobs a large enough claim must return."""
        return min(self.least_by_tenant(waiting).total(), self.free_slots_in_queue())

    def least_by_tenant(self, waiting: set[str]) -> Counter[str]:
        """The same for each tenant, if the queue itself has free slots."""
        counts = Counter(self.tenant(job_id) for job_id in waiting)
        return +Counter({tenant: min(count, self.free_slots(tenant)) for tenant, count in counts.items()})

    def tenant(self, job_id: str) -> str:
        return self.jobs[job_id].envelope.tenant_id

    def backlog(self) -> tuple[int, int]:
        """The least and the greatest possible number of ready and running jobs."""
        running = sum(job.lease is not None for job in self.jobs.values())
        return running + len(self.ready()), running + len(self.claimable())

    def waiting(self, *, in_pending: bool) -> list[ModelJob]:
        """Jobs with a due time: the retries of a `pending` queue, or all others."""
        return [
            job
            for job in self.jobs.values()
            if job.due_at is not None and (self.pending and job.state is State.RETRYING) is in_pending
        ]

    def due(self, *, in_pending: bool) -> set[str]:
        return {job.job_id for job in self.waiting(in_pending=in_pending) if (job.due_at or 0) <= self.now}

    def notice(self) -> None:
        for job_id in self.due(in_pending=False):
            self.jobs[job_id].may_be_ready = True

    def promote(self, count: int) -> None:
        due = [self.jobs[job_id] for job_id in self.due(in_pending=False)]
        assert sum(not job.may_be_ready for job in due) <= count <= len(due)
        for job in due:
            job.due_at, job.may_be_ready = None, False

    def start(self, claim: Claim) -> None:
        """Apply a claim of a ready or due job."""
        job = self.jobs[claim.job_id]
        expected = {job.attempt + 1, job.attempt} if job.revoked else {job.attempt + 1}
        assert claim.attempt in expected, f"attempt {claim.attempt}, expected {expected}"
        if job.revoked:
            job.lost_leases = claim.meta.lost_leases
        job.lost_since_claimed = 0
        self._lease(job, claim)

    def lost(self) -> set[str]:
        return {job.job_id for job in self.jobs.values() if job.lease and job.expires_at <= self.now}

    def poisoned(self) -> set[str]:
        return {job_id for job_id in self.lost() if self.jobs[job_id].lost_since_claimed >= MAX_DELIVERIES}

    def requeue(self, job_ids: set[str]) -> None:
        """Due retries of the pending list without a free slot become ready."""
        for job_id in job_ids:
            self.jobs[job_id].due_at = None

    def reclaim_job(self, claim: Claim) -> None:
        """Apply a reclaim of an expired lease."""
        job = self.jobs[claim.job_id]
        assert claim.attempt == job.attempt + 1
        job.lost_leases += 1
        job.lost_since_claimed += 1
        self._lease(job, claim)

    def poison(self, job_id: str) -> None:
        self._dead_letter(self.jobs[job_id])

    def survive(self, job_id: str) -> None:
        """Apply a reclaim of a lease that expired in an outage: the job is released, and the loss does not count."""
        job = self.jobs[job_id]
        job.lost_leases += 1
        job.state, job.lease, job.settled = State.QUEUED, None, "released"
        job.asleep_until = self.now

    def holds(self, lease: Lease) -> bool:
        return self.jobs[lease.job_id].lease == lease

    def renew(self, lease: Lease) -> None:
        job = self.jobs[lease.job_id]
        if self.now >= job.expires_at + (OUTAGE_LEASES - 1) * VISIBILITY_MS:
            self.outage_until = self.now + VISIBILITY_MS
        job.expires_at = self.now + VISIBILITY_MS

    def held_by(self, worker: str) -> dict[str, int]:
        """Map the tokens of this worker's leases to their attempts."""
        leased = [job for job in self.jobs.values() if job.lease is not None and job.lease.worker == worker]
        return {job.lease.token: job.attempt for job in leased if job.lease is not None}

    # Settling and moving ---------------------------------------------------------------------------

    def settle(self, claim: Claim, verdict: Verdict) -> SettleResult:
        job = self.jobs[claim.job_id]
        if job.lease != claim.lease:
            return SettleResult.ALREADY if self.was_settled(claim) else SettleResult.STALE
        job.settled = claim.lease.token
        job.lease = None
        job.state = TARGETS[type(verdict)]
        match verdict:
            case RetryLater(delay_ms=delay_ms, counts=counts):
                job.due_at = self.now + delay_ms
                job.retry_count += counts
            case Release(delay_ms=delay_ms, started=started):
                job.asleep_until = self.now + delay_ms
                job.due_at = job.asleep_until if delay_ms else None
                job.attempt -= not started
            case DeadLetter():
                self._dead_letter(job)
            case Hold(request=request):
                job.approval_request = request
            case Succeed() | Suspend():
                pass
            case _:
                assert_never(verdict)
        return SettleResult.APPLIED

    def was_settled(self, claim: Claim) -> bool:
        return self.jobs[claim.job_id].settled == claim.lease.token

    def may_move(self, job_id: str, to: State, expected: State | None) -> bool:
        state = self.jobs[job_id].state
        return is_legal(state, to) and expected in (None, state)

    def expedite(self, job: ModelJob) -> None:
        """Apply an operator's expedite of a waiting job."""
        job.due_at = min(job.due_at or self.now, self.now)
        job.run_at, job.asleep_until = min(job.run_at, self.now), min(job.asleep_until, self.now)
        job.may_be_ready = not (self.pending and job.state is State.RETRYING)

    def move(self, job_id: str, to: State, approval: Approval | None = None) -> State:
        job = self.jobs[job_id]
        came_from, job.state = job.state, to
        if (
            job.approval_request is not None
            and approval is not None
            and approval.approval_id == job.approval_request.approval_id
        ):
            if job.approval_request.name:
                job.approvals[job.approval_request.name] = approval
            else:
                job.cleared = job.approval_request.payload_hash
        job.approval_request = None
        job.revoked = job.revoked or came_from is State.RUNNING
        job.lease, job.due_at, job.may_be_ready = None, None, False
        if to is State.QUEUED and max(job.run_at, job.asleep_until) > self.now:
            job.due_at = max(job.run_at, job.asleep_until)
            job.may_be_ready = job.run_at <= self.now
        if came_from is State.SUSPENDED and to is State.QUEUED:
            job.retry_count = 0
            job.revoked = job.revoked or job.lost_leases > 0
        if to is State.DLQ_PENDING:
            self._dead_letter(job)
        return came_from

    def open_jobs(self) -> list[ModelJob]:
        return [job for job in self.jobs.values() if job.state not in FINAL]

    def _lease(self, job: ModelJob, claim: Claim) -> None:
        assert claim.meta.retry_count == job.retry_count, "a retry was lost or added"
        assert claim.payload == job.envelope.payload
        assert claim.tenant_id == job.envelope.tenant_id
        assert (claim.meta.approval_request, claim.meta.approved_hash) == (None, job.cleared)
        assert (claim.meta.approvals or {}) == job.approvals
        job.state, job.attempt = State.RUNNING, claim.attempt
        job.due_at, job.may_be_ready, job.revoked, job.asleep_until = None, False, False, 0
        # A job claimed before its time does not wait for it again.
        job.run_at = min(job.run_at, self.now)
        job.lease, job.expires_at = claim.lease, self.now + VISIBILITY_MS

    def _dead_letter(self, job: ModelJob) -> None:
        job.lease = None
        job.state = State.DLQ_PENDING if self.ledger else State.FAILED
