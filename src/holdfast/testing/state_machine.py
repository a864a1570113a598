"""Random histories: a Hypothesis state machine drives an engine and its model with the same steps.

Workers claim, settle, renew, crash and return late; operators move jobs, decide, expedite and claim them
(`operator_rules.py`); replies are lost and operations resent; time passes. Every job is compared after each step. At
the end all open jobs are finished, and the feed must have a legal history of each job.

Nothing drawn depends on the engine's answers: which of several ready jobs a claim returns is the engine's choice, and
a repeated example must take the same steps.

    machine = engine_machine(world)
    run_state_machine_as_test(machine, settings=…)

A failing run prints its steps as a program. With `derandomize` it fails again at the same step.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Coroutine, Iterable
from itertools import count
from typing import Any, ClassVar, Final, Protocol, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from holdfast.core.history import check_history
from holdfast.core.job import (
    ApprovalRequest,
    Claim,
    Envelope,
    Event,
    Failure,
    JobInfo,
    KeyReuse,
    Meta,
    Priority,
    Receipt,
)
from holdfast.core.rebuild import rebuild_job
from holdfast.core.states import FINAL, OPERATOR_PREFIX, OPERATOR_TARGETS, State
from holdfast.core.verdict import (
    DeadLetter,
    Hold,
    Release,
    RetryLater,
    Settlement,
    SettleResult,
    Succeed,
    Suspend,
    Verdict,
)
from holdfast.engine.port import Engine
from holdfast.errors import TransitionInvalid
from holdfast.testing.contract.harness import open_queue
from holdfast.testing.model import MAX_DELIVERIES, UNIT_MS, VISIBILITY_MS, Model
from holdfast.testing.operator_rules import REQUESTS, TENANTS, OperatorRules

T = TypeVar("T")

#: Options of the engines of a world. Retries of queues named `pending…` wait in the pending list.
OPTIONS: Final[dict[str, Any]] = {
    "visibility_timeout_ms": VISIBILITY_MS,
    "max_deliveries": MAX_DELIVERIES,
    "feed_limit": 1_000_000,
    "idempotency_window_ms": 1_000_000 * UNIT_MS,
    "finished_ttl_ms": 1_000_000 * UNIT_MS,
}

DELAYS_MS: Final = (0, UNIT_MS // 2, UNIT_MS + UNIT_MS // 2)
WORKERS: Final = ("a", "b", "c")
FAILURE: Final = Failure("TASK_ERROR", "no luck")

_queue_numbers = count(1)

delays = st.sampled_from(DELAYS_MS)
workers = st.sampled_from(WORKERS)
#: Rare, so that most runs make progress.
sometimes = st.sampled_from((False, False, False, True))
#: An index, taken modulo the number of choices.
picks = st.integers(0, 11)
verdicts: st.SearchStrategy[Verdict] = st.one_of(
    st.just(Succeed(b"1")),
    st.builds(RetryLater, delays, st.just(FAILURE), st.booleans()),
    st.just(DeadLetter(FAILURE)),
    st.just(Suspend(FAILURE)),
    st.builds(Hold, st.just("really?"), st.sampled_from((None, *REQUESTS))),
    st.builds(Release, st.just("draining"), delays, st.booleans(), st.booleans()),
)
submissions = st.fixed_dictionaries(
    {
        # The last two stand for the ids of the first jobs.
        "idempotency_key": st.sampled_from(("", "", "k1", "k2", "0", "1")),
        "other_arguments": sometimes,
        "on_key_reuse": st.sampled_from(list(KeyReuse)),
        "tenant_id": st.sampled_from(TENANTS),
        "delay_ms": st.sampled_from((0, *DELAYS_MS)),
        "priority": st.sampled_from(list(Priority)),
        "hold": sometimes,
        "request": st.sampled_from((None, *REQUESTS)),
        "schema": st.sampled_from(("", "0a1b2c3d", "4e5f6071")),
    }
)


class World(Protocol):
    """The environment of the machine: a store that outlives the examples."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engines' event loop."""
        ...

    async def make(self, *, ledger: bool) -> Engine:
        """Return a new, opened engine with `OPTIONS`. Queues named `pending…` use the pending list."""
        ...

    async def advance(self, queue: str, ms: int) -> None:
        """Advance time, at least for this queue."""
        ...


class EngineMachine(OperatorRules):
    """Random steps on one queue. Subclasses set `world`."""

    world: ClassVar[World]

    @initialize(ledger=st.booleans(), pending=st.booleans(), batch=st.lists(submissions, min_size=2, max_size=6))
    def begin(self, ledger: bool, pending: bool, batch: list[dict[str, Any]]) -> None:
        number = next(_queue_numbers)
        self.queue = f"{'pending' if pending else 'schedule'}-{number}"
        self.engine = self._run(self.world.make(ledger=ledger))
        if ledger:
            self._run(open_queue(self.engine, self.queue))
        self.model = Model(ledger, pending)
        self.envelopes: list[Envelope] = []
        #: Claims by worker and token, lost leases included: a worker learns of a loss only from the engine's answer.
        self.in_flight: dict[str, dict[str, Claim]] = {worker: {} for worker in WORKERS}
        self.incarnations = dict.fromkeys(WORKERS, 0)
        self.submit(batch, resend=False)

    # Submitting ------------------------------------------------------------------------------------

    @rule(batch=st.lists(submissions, min_size=1, max_size=3), resend=sometimes)
    def submit(self, batch: list[dict[str, Any]], resend: bool) -> None:
        envelopes = [self._envelope(len(self.envelopes) + index, **fields) for index, fields in enumerate(batch)]
        self.envelopes += envelopes
        self._submit(envelopes)
        if resend:
            # Together with older ones, like a caller that got no reply.
            self._submit([*self.envelopes[:2], *envelopes])

    def _submit(self, envelopes: list[Envelope]) -> None:
        answers = self._run(self.engine.submit_each(envelopes))
        assert [_answer(each) for each in answers] == [_answer(self.model.submit(envelope)) for envelope in envelopes]

    def _envelope(
        self,
        number: int,
        priority: Priority,
        request: ApprovalRequest | None,
        idempotency_key: str,
        other_arguments: bool,
        **fields: Any,
    ) -> Envelope:
        if idempotency_key.isdecimal():
            idempotency_key = f"{self.queue}-{int(idempotency_key):03}"
        return Envelope(
            job_id=f"{self.queue}-{number:03}",
            task="noop",
            payload=b'{"n":%d}' % (-1 if other_arguments else 0),
            idempotency_key=idempotency_key,
            queue=self.queue,
            meta=Meta(priority=priority, approval_request=request if fields["hold"] else None),
            **fields,
        )

    # Working ---------------------------------------------------------------------------------------

    @rule(worker=workers, limit=st.integers(1, 4), lost=sometimes)
    def claim(self, worker: str, limit: int, lost: bool) -> None:
        self._receive(worker, self._claim(worker, limit), lost)

    def _claim(self, worker: str, limit: int) -> list[Claim]:
        least, allowed = self.model.least(self.model.ready()), self.model.claimable()
        slots = self.model.free_slots_in_queue()
        free = {tenant: self.model.free_slots(tenant) for tenant in TENANTS}
        claims = self._run(self.engine.claim(self._incarnation(worker), [self.queue], limit, 0))
        given = {claim.job_id for claim in claims}
        assert given <= allowed, f"{given - allowed} may not run"
        assert len(given) == len(claims) >= min(limit, least)
        assert len(claims) <= slots, "the queue exceeds its concurrency"
        for tenant, share in Counter(claim.tenant_id for claim in claims).items():
            assert share <= free[tenant], f"{tenant} exceeds its concurrency"
        for claim in claims:
            self.model.start(claim)
        self.model.notice()
        return claims

    @rule(worker=workers, verdict=verdicts, resend=sometimes)
    def claim_and_settle(self, worker: str, verdict: Verdict, resend: bool) -> None:
        """Run one job without a fault."""
        settlements = [self._settlement(claim, verdict) for claim in self._claim(worker, 1)]
        for _ in range(2 if resend else 1):
            self._settle(settlements)

    @rule(worker=workers, lost=sometimes)
    def reclaim(self, worker: str, lost: bool) -> None:
        poisoned, expired, survived = self.model.poisoned(), self.model.lost(), set[str]()
        if self.model.now < self.model.outage_until:
            poisoned, expired, survived = set(), set(), expired
        due = self.model.due(in_pending=True)
        expected, most = self.model.least(due), self.model.least_by_tenant(due)
        claims = self._run(self.engine.reclaim(self._incarnation(worker), [self.queue], 100))
        given = {claim.job_id for claim in claims}
        assert given - due == expired - poisoned
        shares = Counter(self.model.tenant(job_id) for job_id in given & due)
        assert shares.total() == expected
        assert shares <= most
        for claim in claims:
            if claim.job_id in due:
                self.model.start(claim)
            else:
                self.model.reclaim_job(claim)
        self.model.requeue(due - given)
        for job_id in poisoned:
            self.model.poison(job_id)
        for job_id in survived:
            self.model.survive(job_id)
        self._receive(worker, claims, lost)

    @rule(worker=workers)
    def recover_claims(self, worker: str) -> None:
        incarnation, known = self._incarnation(worker), self.in_flight[worker]
        leases = {claim.lease for claim in known.values()}
        claims = self._run(self.engine.recover_claims(incarnation, [self.queue], leases))
        granted = self.model.held_by(incarnation)
        assert {claim.lease.token: claim.attempt for claim in claims} == {
            token: attempt for token, attempt in granted.items() if token not in known
        }
        self._receive(worker, claims, lost=False)

    @rule(
        worker=workers,
        chosen=st.lists(st.tuples(picks, verdicts), min_size=1, max_size=3),
        resend=sometimes,
        drop=st.booleans(),
    )
    def settle(self, worker: str, chosen: list[tuple[int, Verdict]], resend: bool, drop: bool) -> None:
        claims = self._claims_of(worker)
        if not claims:
            return
        tokens = list(claims)
        ends = {tokens[pick % len(tokens)]: verdict for pick, verdict in chosen}
        for _ in range(2 if resend else 1):
            self._settle([self._settlement(claims[token], verdict) for token, verdict in ends.items()])
        if drop:
            for token in ends:
                del claims[token]

    @rule(worker=workers)
    def renew(self, worker: str) -> None:
        claims = self._claims_of(worker)
        leases = [claim.lease for claim in claims.values()]
        lost = self._run(self.engine.renew(leases))
        assert lost == [lease for lease in leases if not self.model.holds(lease)]
        for lease in leases:
            if lease in lost:
                del claims[lease.token]
            else:
                self.model.renew(lease)

    @rule(worker=workers, deregister=st.booleans())
    def crash(self, worker: str, deregister: bool) -> None:
        """Replace the worker with its next incarnation.

        Deregistering with claims in flight must not lose a job either.
        """
        if deregister:
            self._run(self.engine.deregister_worker(self._incarnation(worker), [self.queue]))
        self.in_flight[worker].clear()
        self.incarnations[worker] += 1

    # Time and operators ----------------------------------------------------------------------------

    @rule()
    def promote(self) -> None:
        self.model.promote(self._run(self.engine.promote([self.queue], 100)).count)

    @rule(units=st.sampled_from((1, 2, 4, 4)))
    def pass_time(self, units: int) -> None:
        self._run(self.world.advance(self.queue, units * UNIT_MS))
        self.model.now += units * UNIT_MS

    @rule(pick=picks, to=st.sampled_from(sorted(OPERATOR_TARGETS)), guess=st.sampled_from(("any", "right", "wrong")))
    def move(self, pick: int, to: State, guess: str) -> None:
        job = list(self.model.jobs.values())[pick % len(self.model.jobs)]
        wrong = State.QUEUED if job.state is State.RUNNING else State.RUNNING
        job_id, expected = job.job_id, {"any": None, "right": job.state, "wrong": wrong}[guess]
        legal = self.model.may_move(job_id, to, expected)
        work = self.engine.move(self.queue, job_id, to, actor="ann", reason="chance", expected=expected)
        try:
            came_from: State | None = self._run(work)
        except TransitionInvalid:
            came_from = None
        assert came_from == (self.model.move(job_id, to) if legal else None)

    @rule(ghost=st.booleans())
    def snapshot_and_restore(self, ghost: bool) -> None:
        """Check that the engine knows all jobs in every state, and that restoring them changes nothing."""
        job_ids = [*self.model.jobs, *(["ghost"] if ghost else [])]
        snapshot = self._run(self.engine.snapshot(self.queue, job_ids))
        assert snapshot.unknown == (["ghost"] if ghost else [])
        last = self._run(self.engine.read_feed(self.queue, snapshot.position, 2))
        assert [(entry.position, entry.nonce) for entry in last] == [(snapshot.position, snapshot.nonce)]
        opened = [view for view in self._run(self.engine.get(self.queue, list(self.model.jobs))) if view]
        opened = [view for view in opened if view.state not in FINAL]
        assert self._run(self.engine.restore(self.queue, snapshot, opened)) == [False] * len(opened)

    # Comparing -------------------------------------------------------------------------------------

    @invariant()
    def every_job_has_the_expected_state(self) -> None:
        expected = {
            job.job_id: self._state_and_worker(job.state, job.lease.worker if job.lease else "")
            for job in self.model.jobs.values()
        }
        views = self._run(self.engine.get(self.queue, list(expected)))
        assert {view.job_id: self._state_and_worker(view.state, view.worker) for view in views if view} == expected

    def teardown(self) -> None:
        # After a failed step engine and model already disagree; a second failure would hide the first.
        if sys.exc_info()[0] is None and hasattr(self, "model"):
            self._compare_with_histories()
            self.model.limits.clear()
            self.model.concurrency = None
            self.set_limits()
            self._finish_open_jobs()
            history = check_history(self._events(), ended=True)
            assert {past.job_id: past.state for past in history.histories.values()} == {
                job.job_id: job.state for job in self.model.jobs.values()
            }
            stats = self._run(self.engine.stats(self.queue))
            assert (sum(stats.states.values()), stats.backlog, stats.pending) == (0, 0, 0)
        if hasattr(self, "engine"):
            self._run(self.engine.close())

    def _compare_with_histories(self) -> None:
        """Check that every open job can be rebuilt from its events in the feed."""
        histories: dict[str, list[Event]] = {job_id: [] for job_id in self.model.jobs}
        for event in self._events():
            # Audit entries are not part of a job's history.
            if not event.type.startswith(OPERATOR_PREFIX):
                histories[event.job_id].append(event)
        for view in self._run(self.engine.get(self.queue, list(histories))):
            if view and view.state not in FINAL:
                rebuilt = rebuild_job(self.queue, histories[view.job_id])
                assert _comparable(rebuilt) == _comparable(view), f"{rebuilt}\n{view}"
                assert view.schema == self.model.jobs[view.job_id].envelope.schema

    def _finish_open_jobs(self) -> None:
        """Finish all open jobs, to check that none is stuck."""
        for _ in range(3):
            self.pass_time(4)
            self.promote()
            self.reclaim("a", lost=False)
            self.claim_all()
            for job in self.model.open_jobs():
                for to in _MOVES_OUT.get(job.state, ()):
                    assert self._run(self._move(job.job_id, to)) == self.model.move(job.job_id, to)
        assert self.model.open_jobs() == []

    def claim_all(self) -> None:
        claims = self._run(self.engine.claim(self._incarnation("a"), [self.queue], 500, 0))
        assert {claim.job_id for claim in claims} == self.model.ready()
        for claim in claims:
            self.model.start(claim)
        running = [*claims, *self.in_flight["a"].values()]
        self._settle([self._settlement(claim, Succeed(b"1")) for claim in running])
        self.in_flight["a"].clear()

    # Helpers ---------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.world.run(work)

    def _claims_of(self, worker: str) -> dict[str, Claim]:
        """Claims of this worker, or if it has none, of the worker with the most."""
        return self.in_flight[worker] or max(self.in_flight.values(), key=len)

    def _incarnation(self, worker: str) -> str:
        return f"{worker}{self.incarnations[worker]}"

    def _receive(self, worker: str, claims: Iterable[Claim], lost: bool) -> None:
        if not lost:
            self.in_flight[worker].update({claim.lease.token: claim for claim in claims})

    def _settlement(self, claim: Claim, verdict: Verdict) -> Settlement:
        return Settlement(claim, verdict, claim.claimed_at_ms)

    def _settle(self, settlements: list[Settlement]) -> None:
        answers = self._run(self.engine.settle(settlements))
        assert len(answers) == len(settlements)
        # With two attempts of one job in a batch, an engine may check the older one before or after it writes.
        repeats = {each.claim.lease.token for each in settlements if self.model.was_settled(each.claim)}
        for settlement, answer in zip(settlements, answers, strict=True):
            expected = self.model.settle(settlement.claim, settlement.verdict)
            if expected is SettleResult.STALE and settlement.claim.lease.token in repeats:
                assert answer in (SettleResult.STALE, SettleResult.ALREADY)
            else:
                assert answer is expected

    def _move(self, job_id: str, to: State) -> Coroutine[Any, Any, State]:
        return self.engine.move(self.queue, job_id, to, actor="ann", reason="cleanup")

    def _state_and_worker(self, state: State, worker: str) -> tuple[State, str]:
        return state, worker if state is State.RUNNING else ""

    def _events(self) -> list[Event]:
        events: list[Event] = []
        position = ""
        while True:
            entries = self._run(self.engine.read_feed(self.queue, position, 500))
            # Each page begins with the last entry of the page before.
            new = [entry for entry in entries if entry.position != position]
            if not new:
                return events
            events += [event for entry in new for event in entry.events]
            position = new[-1].position


def _comparable(view: JobInfo) -> tuple[Any, ...]:
    """All fields of an open job except its instants and its lost leases.

    A harness may have moved the instants. Whether lost leases of an attempt that an operator ended count is the
    engine's choice.
    """
    meta, worker = view.meta, view.worker if view.state is State.RUNNING else ""
    counts = (meta.retry_count, meta.unavailable_count, meta.unknown_since_ms > 0)
    policy = (*counts, meta.priority, meta.context, meta.dlq_id)
    approvals = (meta.approval_request, meta.approved_hash, meta.approvals or {})
    history = [(past.number, past.worker, past.outcome, past.failure) for past in meta.history]
    identity = (view.job_id, view.task, view.tenant_id, view.payload, view.idempotency_key, view.trace_id)
    ended_with = view.failure if view.state in (State.RETRYING, State.DLQ_PENDING, State.DLQ_RECORDED) else None
    return identity, view.state, view.attempt, worker, policy, approvals, history, ended_with


def _answer(answer: object) -> object:
    """An answer for comparison: errors are not equal to one another."""
    return answer if isinstance(answer, Receipt) else (type(answer), getattr(answer, "job_id", None))


_MOVES_OUT: Final[dict[State, tuple[State, ...]]] = {
    State.SUSPENDED: (State.QUEUED,),
    State.WAITING_APPROVAL: (State.QUEUED,),
    State.DLQ_PENDING: (State.DLQ_RECORDED, State.FAILED),
    State.DLQ_RECORDED: (State.FAILED,),
}


def engine_machine(world: World) -> type[EngineMachine]:
    """Return the state machine class for this world."""
    return type("EngineMachine", (EngineMachine,), {"world": world})
