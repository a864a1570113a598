"""A queue in plain Python: what an engine should answer, in as few lines as it takes.

No batches, no storage, no clock but a number. `machine.py` drives an engine and this model side by side with
random steps and compares. Where the port leaves an engine a choice (which of the ready jobs a claim gives),
the model checks that the choice was allowed, and follows it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, assert_never

from holdfast.core.job import Approval, ApprovalRequest, Claim, Envelope, Lease, Receipt
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

#: Model time moves in whole units; all durations end on half a unit. However slow the machine, a run of a few
#: seconds never decides on which side of a deadline a step falls.
UNIT_MS: Final = 1_000_000
VISIBILITY_MS: Final = 3 * UNIT_MS + UNIT_MS // 2
MAX_DELIVERIES: Final = 2


@dataclass(slots=True)
class ModelJob:
    """One job as it should be."""

    envelope: Envelope
    state: State
    #: Attempts used up so far.
    attempt: int = 0
    retry_count: int = 0
    lost_leases: int = 0
    #: The one lease that counts, while running.
    lease: Lease | None = None
    expires_at: int = 0
    #: While it waits: when it may run.
    due_at: int | None = None
    #: It has a due time, but an engine may have put it in line: it was due when somebody claimed, or an operator
    #: woke it from its sleep.
    perhaps_in_line: bool = False
    #: What its submitter asked for; no operator makes it run earlier.
    run_at: int = 0
    #: What it asked for itself when it gave its worker back.
    asleep_until: int = 0
    #: An operator took it from its worker: whether that attempt, or its lost leases, count is the engine's choice.
    taken_back: bool = False
    #: The token of the last settlement that was applied.
    settled: str = ""
    #: What people are asked, while it waits for them; what they have allowed so far.
    ask: ApprovalRequest | None = None
    cleared: str = ""
    consents: dict[str, Approval] = field(default_factory=dict)

    @property
    def job_id(self) -> str:
        return self.envelope.job_id

    @property
    def in_line(self) -> bool:
        return self.state in (State.QUEUED, State.RETRYING) and self.due_at is None


@dataclass(slots=True)
class Model:
    """A queue. Methods that end in a question are asked before the engine acts, the others follow it."""

    ledger: bool
    pending: bool
    now: int = 0
    jobs: dict[str, ModelJob] = field(default_factory=dict)
    keys: dict[tuple[str, str], str] = field(default_factory=dict)
    #: How many jobs of a tenant may run at a time.
    limits: dict[str, int | None] = field(default_factory=dict)

    # Submitting ------------------------------------------------------------------------------------

    def submit(self, envelope: Envelope) -> Receipt:
        key = (envelope.tenant_id, envelope.idempotency_key or envelope.job_id)
        if envelope.job_id in self.jobs:
            return Receipt(envelope.job_id)
        if key in self.keys:
            return Receipt(self.keys[key], duplicate=True)
        state = State.WAITING_APPROVAL if envelope.hold else State.QUEUED
        job = ModelJob(envelope, state, run_at=self.now + envelope.delay_ms, ask=envelope.meta.ask)
        if envelope.delay_ms and not envelope.hold:
            job.due_at = job.run_at
        self.jobs[envelope.job_id] = job
        self.keys[key] = envelope.job_id
        return Receipt(envelope.job_id)

    # Holding ---------------------------------------------------------------------------------------

    def ready(self) -> set[str]:
        return {job.job_id for job in self.jobs.values() if job.in_line}

    def claimable(self) -> set[str]:
        """What a claim may give, and need not."""
        perhaps = {job.job_id for job in self.jobs.values() if job.perhaps_in_line}
        return self.ready() | self.due(in_pending=False) | perhaps

    def room(self, tenant: str, *, at_most: bool) -> int:
        """How many more of a tenant's jobs may run. Whether a retry in the pending list has kept its place is the
        engine's choice."""
        limit = self.limits.get(tenant)
        if limit is None:
            return len(self.jobs)
        mine = [job for job in self.jobs.values() if job.envelope.tenant_id == tenant]
        held = sum(job.lease is not None for job in mine)
        kept = 0 if at_most else sum(job in mine for job in self.waiting(in_pending=True))
        return max(0, limit - held - kept)

    def least(self) -> int:
        """How many jobs a claim has to give if it is asked for as many."""
        mine = Counter(self.jobs[job_id].envelope.tenant_id for job_id in self.ready())
        return sum(min(count, self.room(tenant, at_most=False)) for tenant, count in mine.items())

    def backlog(self) -> tuple[int, int]:
        """Jobs in line or running: at least, at most."""
        running = sum(job.lease is not None for job in self.jobs.values())
        return running + len(self.ready()), running + len(self.claimable())

    def waiting(self, *, in_pending: bool) -> list[ModelJob]:
        """Jobs with a due time; retries of a `pending` queue apart from the rest."""
        return [
            job
            for job in self.jobs.values()
            if job.due_at is not None and (self.pending and job.state is State.RETRYING) is in_pending
        ]

    def due(self, *, in_pending: bool) -> set[str]:
        return {job.job_id for job in self.waiting(in_pending=in_pending) if (job.due_at or 0) <= self.now}

    def notice(self) -> None:
        for job_id in self.due(in_pending=False):
            self.jobs[job_id].perhaps_in_line = True

    def promote(self, count: int) -> None:
        due = [self.jobs[job_id] for job_id in self.due(in_pending=False)]
        assert sum(not job.perhaps_in_line for job in due) <= count <= len(due)
        for job in due:
            job.due_at, job.perhaps_in_line = None, False

    def start(self, claim: Claim) -> None:
        """A ready or due job was claimed."""
        job = self.jobs[claim.job_id]
        expected = {job.attempt + 1, job.attempt} if job.taken_back else {job.attempt + 1}
        assert claim.attempt in expected, f"attempt {claim.attempt}, expected {expected}"
        if job.taken_back:
            job.lost_leases = claim.meta.lost_leases
        self._lease(job, claim)

    def lost(self) -> set[str]:
        return {job.job_id for job in self.jobs.values() if job.lease and job.expires_at <= self.now}

    def poisoned(self) -> set[str]:
        return {job_id for job_id in self.lost() if self.jobs[job_id].lost_leases + 1 >= MAX_DELIVERIES}

    def take_over(self, claim: Claim) -> None:
        """A lost lease went to another worker."""
        job = self.jobs[claim.job_id]
        assert claim.attempt == job.attempt + 1
        job.lost_leases += 1
        self._lease(job, claim)

    def poison(self, job_id: str) -> None:
        self._bury(self.jobs[job_id])

    def holds(self, lease: Lease) -> bool:
        return self.jobs[lease.job_id].lease == lease

    def renew(self, lease: Lease) -> None:
        self.jobs[lease.job_id].expires_at = self.now + VISIBILITY_MS

    def held_by(self, worker: str) -> dict[str, int]:
        """Token → attempt of the leases that this worker has."""
        leased = [job for job in self.jobs.values() if job.lease is not None and job.lease.worker == worker]
        return {job.lease.token: job.attempt for job in leased if job.lease is not None}

    # Ending ----------------------------------------------------------------------------------------

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
                self._bury(job)
            case Hold(request=ask):
                job.ask = ask
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
        """A person overruled the time that it waits for."""
        job.due_at = min(job.due_at or self.now, self.now)
        job.run_at, job.asleep_until = min(job.run_at, self.now), min(job.asleep_until, self.now)
        job.perhaps_in_line = not (self.pending and job.state is State.RETRYING)

    def move(self, job_id: str, to: State, consent: Approval | None = None) -> State:
        job = self.jobs[job_id]
        came_from, job.state = job.state, to
        if job.ask is not None and consent is not None and consent.approval_id == job.ask.approval_id:
            if job.ask.name:
                job.consents[job.ask.name] = consent
            else:
                job.cleared = job.ask.payload_hash
        job.ask = None
        job.taken_back = job.taken_back or came_from is State.RUNNING
        job.lease, job.due_at, job.perhaps_in_line = None, None, False
        if to is State.QUEUED and max(job.run_at, job.asleep_until) > self.now:
            job.due_at = max(job.run_at, job.asleep_until)
            job.perhaps_in_line = job.run_at <= self.now
        if came_from is State.SUSPENDED and to is State.QUEUED:
            job.retry_count = 0
            job.taken_back = job.taken_back or job.lost_leases > 0
        if to is State.DLQ_PENDING:
            self._bury(job)
        return came_from

    def open_jobs(self) -> list[ModelJob]:
        return [job for job in self.jobs.values() if job.state not in FINAL]

    def _lease(self, job: ModelJob, claim: Claim) -> None:
        assert claim.meta.retry_count == job.retry_count, "a retry was forgotten or invented"
        assert claim.payload == job.envelope.payload
        assert claim.tenant_id == job.envelope.tenant_id
        assert (claim.meta.ask, claim.meta.cleared) == (None, job.cleared)
        assert (claim.meta.consents or {}) == job.consents
        job.state, job.attempt = State.RUNNING, claim.attempt
        job.due_at, job.perhaps_in_line, job.taken_back, job.asleep_until = None, False, False, 0
        # One that was taken before its time does not go back to waiting for it.
        job.run_at = min(job.run_at, self.now)
        job.lease, job.expires_at = claim.lease, self.now + VISIBILITY_MS

    def _bury(self, job: ModelJob) -> None:
        job.lease = None
        job.state = State.DLQ_PENDING if self.ledger else State.FAILED
