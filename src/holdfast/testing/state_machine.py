"""Random histories: a Hypothesis state machine that drives an engine and its model side by side.

Workers claim, settle, renew, crash and come back late; operators move jobs about, answer, hurry and take them
(`people_rules.py`); replies are lost and operations resent; time passes. After each step every job is compared, at the
end everything still open is worked off, and the feed must tell one legal story for each job.

Nothing that is drawn depends on what the engine answered: which of several ready jobs a claim gives is the engine's
choice, and an example must mean the same steps when it is run again.

    machine = engine_machine(world)
    run_state_machine_as_test(machine, settings=…)

A failing run prints the steps as a program; with `derandomize` it fails again at the same place.
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
from holdfast.core.job import ApprovalRequest, Claim, Envelope, Event, Failure, JobInfo, Meta, Priority
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
from holdfast.testing.model import MAX_DELIVERIES, UNIT_MS, VISIBILITY_MS, Model
from holdfast.testing.operator_rules import ASKS, TENANTS, OperatorRules

T = TypeVar("T")

#: What the engines of a world are made with; retries of queues whose name begins with `pending` wait there.
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
seats = st.sampled_from(WORKERS)
#: Rare, so that most runs get somewhere.
sometimes = st.sampled_from((False, False, False, True))
#: Chooses among however many there are.
picks = st.integers(0, 11)
verdicts: st.SearchStrategy[Verdict] = st.one_of(
    st.just(Succeed(b"1")),
    st.builds(RetryLater, delays, st.just(FAILURE), st.booleans()),
    st.just(DeadLetter(FAILURE)),
    st.just(Suspend(FAILURE)),
    st.builds(Hold, st.just("really?"), st.sampled_from((None, *ASKS))),
    st.builds(Release, st.just("draining"), delays, st.booleans()),
)
submissions = st.fixed_dictionaries(
    {
        "idempotency_key": st.sampled_from(("", "", "k1", "k2")),
        "tenant_id": st.sampled_from(TENANTS),
        "delay_ms": st.sampled_from((0, *DELAYS_MS)),
        "priority": st.sampled_from(list(Priority)),
        "hold": sometimes,
        "ask": st.sampled_from((None, *ASKS)),
    }
)


class World(Protocol):
    """Where the machine runs: a store that outlives the examples."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engines' event loop."""
        ...

    async def make(self, *, ledger: bool) -> Engine:
        """A fresh, opened engine made with `OPTIONS`; queues named `pending…` keep retries in the pending list."""
        ...

    async def advance(self, queue: str, ms: int) -> None:
        """Let time pass, at least for this queue."""
        ...


class EngineMachine(OperatorRules):
    """One queue's life. Subclass with a `world`."""

    world: ClassVar[World]

    @initialize(ledger=st.booleans(), pending=st.booleans(), batch=st.lists(submissions, min_size=2, max_size=6))
    def begin(self, ledger: bool, pending: bool, batch: list[dict[str, Any]]) -> None:
        number = next(_queue_numbers)
        self.queue = f"{'pending' if pending else 'schedule'}-{number}"
        self.engine = self._run(self.world.make(ledger=ledger))
        if ledger:
            self._run(self.engine.attach_reader(self.queue))
        self.model = Model(ledger, pending)
        self.envelopes: list[Envelope] = []
        #: What each worker believes to hold, lost leases included: it learns of them only by asking.
        self.hands: dict[str, dict[str, Claim]] = {seat: {} for seat in WORKERS}
        self.incarnations = dict.fromkeys(WORKERS, 0)
        self.submit(batch, resend=False)

    # Submitting ------------------------------------------------------------------------------------

    @rule(batch=st.lists(submissions, min_size=1, max_size=3), resend=sometimes)
    def submit(self, batch: list[dict[str, Any]], resend: bool) -> None:
        envelopes = [self._envelope(len(self.envelopes) + index, **fields) for index, fields in enumerate(batch)]
        self.envelopes += envelopes
        self._submit(envelopes)
        if resend:
            # Together with older ones, as a caller would that never got an answer.
            self._submit([*self.envelopes[:2], *envelopes])

    def _submit(self, envelopes: list[Envelope]) -> None:
        assert self._run(self.engine.submit(envelopes)) == [self.model.submit(envelope) for envelope in envelopes]

    def _envelope(self, number: int, priority: Priority, ask: ApprovalRequest | None, **fields: Any) -> Envelope:
        return Envelope(
            job_id=f"{self.queue}-{number:03}",
            task="noop",
            payload=b'{"n":%d}' % number,
            queue=self.queue,
            meta=Meta(priority=priority, ask=ask if fields["hold"] else None),
            **fields,
        )

    # Working ---------------------------------------------------------------------------------------

    @rule(seat=seats, limit=st.integers(1, 4), lost=sometimes)
    def claim(self, seat: str, limit: int, lost: bool) -> None:
        self._receive(seat, self._claim(seat, limit), lost)

    def _claim(self, seat: str, limit: int) -> list[Claim]:
        least, allowed = self.model.least(), self.model.claimable()
        room = {tenant: self.model.room(tenant, at_most=True) for tenant in TENANTS}
        claims = self._run(self.engine.claim(self._worker(seat), [self.queue], limit, 0))
        given = {claim.job_id for claim in claims}
        assert given <= allowed, f"{given - allowed} may not run"
        assert len(given) == len(claims) >= min(limit, least)
        for tenant, share in Counter(claim.tenant_id for claim in claims).items():
            assert share <= room[tenant], f"{tenant} runs more than it may"
        for claim in claims:
            self.model.start(claim)
        self.model.notice()
        return claims

    @rule(seat=seats, verdict=verdicts, resend=sometimes)
    def claim_and_settle(self, seat: str, verdict: Verdict, resend: bool) -> None:
        """Where jobs get to when nothing goes wrong."""
        settlements = [self._settlement(claim, verdict) for claim in self._claim(seat, 1)]
        for _ in range(2 if resend else 1):
            self._settle(settlements)

    @rule(seat=seats, lost=sometimes)
    def reclaim(self, seat: str, lost: bool) -> None:
        poisoned, taken = self.model.poisoned(), self.model.lost()
        due = self.model.due(in_pending=True)
        claims = self._run(self.engine.reclaim(self._worker(seat), [self.queue], 100))
        assert {claim.job_id for claim in claims} == (taken - poisoned) | due
        for claim in claims:
            if claim.job_id in due:
                self.model.start(claim)
            else:
                self.model.take_over(claim)
        for job_id in poisoned:
            self.model.poison(job_id)
        self._receive(seat, claims, lost)

    @rule(seat=seats)
    def resume(self, seat: str) -> None:
        worker, hand = self._worker(seat), self.hands[seat]
        claims = self._run(self.engine.recover_claims(worker, [self.queue], {claim.lease for claim in hand.values()}))
        granted = self.model.held_by(worker)
        assert {claim.lease.token: claim.attempt for claim in claims} == {
            token: attempt for token, attempt in granted.items() if token not in hand
        }
        self._receive(seat, claims, lost=False)

    @rule(
        seat=seats,
        chosen=st.lists(st.tuples(picks, verdicts), min_size=1, max_size=3),
        resend=sometimes,
        forget=st.booleans(),
    )
    def settle(self, seat: str, chosen: list[tuple[int, Verdict]], resend: bool, forget: bool) -> None:
        hand = self._hand(seat)
        if not hand:
            return
        tokens = list(hand)
        ends = {tokens[pick % len(tokens)]: verdict for pick, verdict in chosen}
        for _ in range(2 if resend else 1):
            self._settle([self._settlement(hand[token], verdict) for token, verdict in ends.items()])
        if forget:
            for token in ends:
                del hand[token]

    @rule(seat=seats)
    def renew(self, seat: str) -> None:
        hand = self._hand(seat)
        leases = [claim.lease for claim in hand.values()]
        lost = self._run(self.engine.renew(leases))
        assert lost == [lease for lease in leases if not self.model.holds(lease)]
        for lease in leases:
            if lease in lost:
                del hand[lease.token]
            else:
                self.model.renew(lease)

    @rule(seat=seats, farewell=st.booleans())
    def crash(self, seat: str, farewell: bool) -> None:
        """The worker is gone, and another incarnation takes its seat. One that takes its leave loses no job either."""
        if farewell:
            self._run(self.engine.deregister_worker(self._worker(seat), [self.queue]))
        self.hands[seat].clear()
        self.incarnations[seat] += 1

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
    def survey(self, ghost: bool) -> None:
        """Whatever has happened, no job is unknown, and putting known ones back changes nothing."""
        job_ids = [*self.model.jobs, *(["ghost"] if ghost else [])]
        cut = self._run(self.engine.snapshot(self.queue, job_ids))
        assert cut.unknown == (["ghost"] if ghost else [])
        last = self._run(self.engine.read_feed(self.queue, cut.position, 2))
        assert [(entry.position, entry.nonce) for entry in last] == [(cut.position, cut.nonce)]
        opened = [view for view in self._run(self.engine.get(self.queue, list(self.model.jobs))) if view]
        opened = [view for view in opened if view.state not in FINAL]
        assert self._run(self.engine.restore(self.queue, cut, opened)) == [False] * len(opened)

    # Comparing -------------------------------------------------------------------------------------

    @invariant()
    def every_job_is_where_it_should_be(self) -> None:
        expected = {
            job.job_id: self._seen_as(job.state, job.lease.worker if job.lease else "")
            for job in self.model.jobs.values()
        }
        views = self._run(self.engine.get(self.queue, list(expected)))
        assert {view.job_id: self._seen_as(view.state, view.worker) for view in views if view} == expected

    def teardown(self) -> None:
        # After a failed step the engine and the model disagree already; a second complaint would hide the first.
        if sys.exc_info()[0] is None and hasattr(self, "model"):
            self._compare_with_stories()
            self.model.limits.clear()
            self.set_limits()
            self._work_off()
            history = check_history(self._events(), ended=True)
            assert {story.job_id: story.state for story in history.histories.values()} == {
                job.job_id: job.state for job in self.model.jobs.values()
            }
            stats = self._run(self.engine.stats(self.queue))
            assert (sum(stats.states.values()), stats.backlog, stats.pending) == (0, 0, 0)
        if hasattr(self, "engine"):
            self._run(self.engine.close())

    def _compare_with_stories(self) -> None:
        """The feed tells enough to put every open job back as it is."""
        stories: dict[str, list[Event]] = {job_id: [] for job_id in self.model.jobs}
        for event in self._events():
            # What people did is not a part of a job's story.
            if not event.type.startswith(OPERATOR_PREFIX):
                stories[event.job_id].append(event)
        for view in self._run(self.engine.get(self.queue, list(stories))):
            if view and view.state not in FINAL:
                told = rebuild_job(self.queue, stories[view.job_id])
                assert _essence(told) == _essence(view), f"{told}\n{view}"

    def _work_off(self) -> None:
        """Whatever is still open ends now: nothing is stuck."""
        for _ in range(3):
            self.pass_time(4)
            self.promote()
            self.reclaim("a", lost=False)
            self.claim_all()
            for job in self.model.open_jobs():
                for to in _WAY_OUT.get(job.state, ()):
                    assert self._run(self._move(job.job_id, to)) == self.model.move(job.job_id, to)
        assert self.model.open_jobs() == []

    def claim_all(self) -> None:
        claims = self._run(self.engine.claim(self._worker("a"), [self.queue], 500, 0))
        assert {claim.job_id for claim in claims} == self.model.ready()
        for claim in claims:
            self.model.start(claim)
        running = [*claims, *self.hands["a"].values()]
        self._settle([self._settlement(claim, Succeed(b"1")) for claim in running])
        self.hands["a"].clear()

    # Helpers ---------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.world.run(work)

    def _hand(self, seat: str) -> dict[str, Claim]:
        """What the worker on this seat holds, or if that is nothing, on another."""
        return self.hands[seat] or max(self.hands.values(), key=len)

    def _worker(self, seat: str) -> str:
        return f"{seat}{self.incarnations[seat]}"

    def _receive(self, seat: str, claims: Iterable[Claim], lost: bool) -> None:
        if not lost:
            self.hands[seat].update({claim.lease.token: claim for claim in claims})

    def _settlement(self, claim: Claim, verdict: Verdict) -> Settlement:
        return Settlement(claim, verdict, claim.claimed_at_ms)

    def _settle(self, settlements: list[Settlement]) -> None:
        answers = self._run(self.engine.settle(settlements))
        assert len(answers) == len(settlements)
        # Asked about two attempts of one job at once, an engine may look at the older one before or after it writes.
        repeats = {each.claim.lease.token for each in settlements if self.model.was_settled(each.claim)}
        for settlement, answer in zip(settlements, answers, strict=True):
            expected = self.model.settle(settlement.claim, settlement.verdict)
            if expected is SettleResult.STALE and settlement.claim.lease.token in repeats:
                assert answer in (SettleResult.STALE, SettleResult.ALREADY)
            else:
                assert answer is expected

    def _move(self, job_id: str, to: State) -> Coroutine[Any, Any, State]:
        return self.engine.move(self.queue, job_id, to, actor="ann", reason="clearing up")

    def _seen_as(self, state: State, worker: str) -> tuple[State, str]:
        return state, worker if state is State.RUNNING else ""

    def _events(self) -> list[Event]:
        events: list[Event] = []
        position = ""
        while True:
            entries = self._run(self.engine.read_feed(self.queue, position, 500))
            # The first one of a page is the last one of the page before.
            new = [entry for entry in entries if entry.position != position]
            if not new:
                return events
            events += [event for entry in new for event in entry.events]
            position = new[-1].position


def _essence(view: JobInfo) -> tuple[Any, ...]:
    """All of an open job but its instants, which a harness may have moved, and lost leases: whether those of an attempt
    that an operator took away count is the engine's choice."""
    meta, worker = view.meta, view.worker if view.state is State.RUNNING else ""
    policy = (meta.retry_count, meta.unavailable_count, meta.priority, meta.context, meta.dlq_id)
    people = (meta.ask, meta.cleared, meta.consents or {})
    history = [(past.number, past.worker, past.outcome, past.failure) for past in meta.history]
    identity = (view.job_id, view.task, view.tenant_id, view.payload, view.idempotency_key, view.trace_id)
    ended_with = view.failure if view.state in (State.RETRYING, State.DLQ_PENDING, State.DLQ_RECORDED) else None
    return identity, view.state, view.attempt, worker, policy, people, history, ended_with


_WAY_OUT: Final[dict[State, tuple[State, ...]]] = {
    State.SUSPENDED: (State.QUEUED,),
    State.WAITING_APPROVAL: (State.QUEUED,),
    State.DLQ_PENDING: (State.DLQ_RECORDED, State.FAILED),
    State.DLQ_RECORDED: (State.FAILED,),
}


def engine_machine(world: World) -> type[EngineMachine]:
    """The machine on this world."""
    return type("EngineMachine", (EngineMachine,), {"world": world})
