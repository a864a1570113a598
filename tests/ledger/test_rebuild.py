"""Folding a job's events gives the job that the engine shows: after every step of random histories, on both engines."""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from holdfast.core.job import Approval, ApprovalRequest, Envelope, Event, JobInfo, Meta, Priority
from holdfast.core.rebuild import IncompleteHistory, rebuild_job
from holdfast.core.retry import Retry
from holdfast.core.states import EXPEDITED_EVENT, FINAL, FORKED_EVENT, RESTORED_EVENT, State
from holdfast.testing.state_machine import EngineMachine
from tests.engine.harness import RedisHarness, SqliteHarness
from tests.engine.test_model import EngineRig

EXAMPLES: Final = int(os.environ.get("HOLDFAST_TEST_STORY_EXAMPLES", "25"))

#: States in which the failure says why the job is there.
_TELLING: Final = (State.RETRYING, State.DLQ_PENDING)


class StoryMachine(EngineMachine):
    """The machine of the engine contract, with the fold looking over its shoulder."""

    aged = False

    def _envelope(self, number: int, priority: Priority, request: ApprovalRequest | None, **fields: Any) -> Envelope:
        envelope = super()._envelope(number, priority, request, **fields)
        policy = msgspec.structs.replace(envelope.meta, retry=Retry(max_retries=number), context={"n": number})
        return msgspec.structs.replace(envelope, meta=policy, trace_id=f"trace-{number}")

    @invariant()
    def the_story_tells_the_job(self) -> None:
        stories: dict[str, list[Event]] = {}
        for event in self._events():
            stories.setdefault(event.job_id, []).append(event)
        views = self._run(self.engine.get(self.queue, list(self.model.jobs)))
        now_ms = self._run(self.engine.now_ms())
        for view in views:
            if view is not None and view.state not in FINAL:
                told = rebuild_job(self.queue, stories[view.job_id])
                expected, found = seen(view, now_ms), seen(told, now_ms)
                if self.aged and self.model.now:
                    # Redis's clock cannot be moved: what waits was made older instead, and the feed does not know.
                    del expected["due"], found["due"]
                assert found == expected, stories[view.job_id]
                assert told.meta.lost_leases >= view.meta.lost_leases >= 0


def seen(view: JobInfo, now_ms: int) -> dict[str, Any]:
    """What matters for a job that is to be put back, told alike by engine and fold."""
    meta = view.meta
    return {
        "identity": (view.job_id, view.task, view.queue, view.tenant_id, view.trace_id),
        "key": view.idempotency_key or view.job_id,
        "payload": view.payload,
        "state": view.state,
        "attempt": view.attempt,
        "worker": view.worker if view.state is State.RUNNING else "",
        "retry_count": meta.retry_count,
        # A running job's view leaves out what its present lease has lost, on one of the engines.
        "lost_leases": None if view.state is State.RUNNING else meta.lost_leases,
        "people": (meta.approval_request, meta.approved_hash, meta.approvals),
        "outage": (meta.unavailable_count, meta.unavailable_since_ms),
        "policy": (meta.priority, meta.retry, meta.max_retries, meta.context),
        # Ends of attempts are the worker's estimate in one and the engine's time in the other.
        "history": [(a.number, a.worker, a.started_at_ms, a.outcome, a.failure) for a in meta.history],
        "failure": view.failure if view.state in _TELLING else None,
        # One that is due may be in line by now.
        "due": view.next_attempt_at_ms if view.next_attempt_at_ms > now_ms else 0,
        "created_at": view.created_at_ms,
    }


def explore(harness: SqliteHarness | RedisHarness, examples: int) -> None:
    with asyncio.Runner() as runner:
        aged = isinstance(harness, RedisHarness)
        machine = type("Machine", (StoryMachine,), {"world": EngineRig(harness, runner), "aged": aged})
        try:
            run_state_machine_as_test(
                machine,
                settings=settings(
                    max_examples=examples,
                    stateful_step_count=25,
                    deadline=None,
                    derandomize=True,
                    print_blob=True,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            runner.run(harness.close())


@pytest.mark.search
@pytest.mark.timeout(1_800)
def test_the_fold_agrees_with_sqlite(tmp_path: Path) -> None:
    explore(SqliteHarness(tmp_path / "holdfast.db"), EXAMPLES)


@pytest.mark.redis
@pytest.mark.search
@pytest.mark.timeout(1_800)
def test_the_fold_agrees_with_redis(redis_url: str) -> None:
    explore(RedisHarness(redis_url, f"story-{secrets.token_hex(4)}"), EXAMPLES)


# Corners -------------------------------------------------------------------------------------------


def move(from_state: State | None, to_state: State | None, name: str = "", **fields: Any) -> Event:
    return Event(type=name or "task.moved", job_id="j", at_ms=1, from_state=from_state, to_state=to_state, **fields)


def created(**data: Any) -> Event:
    return move(None, State.QUEUED, data={"task": "t", "payload": "{}", "idempotency_key": "j", **data})


def test_a_story_without_a_beginning_is_refused() -> None:
    with pytest.raises(IncompleteHistory):
        rebuild_job("q", [])
    with pytest.raises(IncompleteHistory):
        rebuild_job("q", [move(State.QUEUED, State.RUNNING)])
    # What a projector writes that never saw the creation.
    with pytest.raises(IncompleteHistory):
        rebuild_job("q", [created(task="unknown", payload="null")])


def test_after_a_fork_the_job_is_where_the_engine_woke_up() -> None:
    story = [
        created(),
        move(State.QUEUED, State.RUNNING, attempt=1, worker="a"),
        move(State.RUNNING, State.RETRYING, attempt=1, retry_count=1, data={"code": "E", "message": "m"}),
        move(State.RETRYING, State.RUNNING, attempt=2, retry_count=1, worker="a"),
        move(State.RUNNING, State.QUEUED, FORKED_EVENT, attempt=0),
        move(State.QUEUED, State.RUNNING, attempt=1, worker="b"),
    ]
    view = rebuild_job("q", story)
    assert (view.state, view.attempt, view.meta.retry_count, view.meta.history) == (State.RUNNING, 1, 0, ())


def test_after_a_fork_in_the_same_state_the_job_is_in_its_earlier_attempt() -> None:
    failed = {"code": "E", "message": "m"}
    story = [
        created(),
        move(State.QUEUED, State.RUNNING, attempt=1, worker="a"),
        move(State.RUNNING, State.RETRYING, attempt=1, retry_count=1, data=failed),
        move(State.RETRYING, State.RUNNING, attempt=2, retry_count=1, worker="a"),
        move(State.RUNNING, State.RETRYING, attempt=2, retry_count=2, data=failed),
        move(State.RETRYING, State.RETRYING, FORKED_EVENT, attempt=1, retry_count=1),
    ]
    view = rebuild_job("q", story)
    assert (view.state, view.attempt, view.meta.retry_count) == (State.RETRYING, 1, 1)
    assert [attempt.number for attempt in view.meta.history] == [1]


def test_a_restored_job_goes_on_from_where_it_was() -> None:
    story = [
        created(),
        move(State.QUEUED, State.RUNNING, attempt=1, worker="a"),
        move(State.RUNNING, State.QUEUED, RESTORED_EVENT, attempt=1),
    ]
    view = rebuild_job("q", story)
    assert (view.state, view.attempt, view.worker, view.meta.lost_leases) == (State.QUEUED, 1, "", 0)
    later = [*story, move(State.QUEUED, State.RUNNING, attempt=2, worker="b"), move(None, None, "task.heartbeat")]
    assert rebuild_job("q", later).attempt == 2


def test_a_policy_travels_as_it_was_submitted() -> None:
    meta = Meta(retry=Retry(max_retries=7), max_retries=3, context={"a": [1]})
    text = msgspec.json.encode(meta).decode()
    for given in (text, msgspec.json.decode(text)):
        view = rebuild_job("q", [created(meta=given, priority=2)])
        assert view.meta == msgspec.structs.replace(meta, priority=2)


# People --------------------------------------------------------------------------------------------

ASK = ApprovalRequest(approval_id="a1", payload_hash="h1", quorum=2)
QUESTION = ApprovalRequest(approval_id="a2", payload_hash="h2", name="ship?")


def held() -> Event:
    meta = msgspec.json.encode(Meta(approval_request=ASK)).decode()
    data = {"task": "t", "payload": "{}", "idempotency_key": "j", "meta": meta}
    return move(None, State.WAITING_APPROVAL, "approval.requested", data=data)


def approved(ask: ApprovalRequest, at_ms: int = 5) -> Event:
    consent = Approval(ask.approval_id, ("ann", "bob"), at_ms)
    data = {"actor": "bob", "reason": "", "approval": msgspec.to_builtins(consent)}
    return move(State.WAITING_APPROVAL, State.QUEUED, "approval.approved", data=data)


def asks(ask: ApprovalRequest) -> Event:
    data = {"message": "?", "approval_request": msgspec.to_builtins(ask)}
    return move(State.RUNNING, State.WAITING_APPROVAL, "approval.requested", attempt=1, data=data)


def test_what_people_are_asked_and_have_allowed_is_told() -> None:
    story = [held()]
    assert rebuild_job("q", story).meta.approval_request == ASK
    story += [approved(ASK)]
    meta = rebuild_job("q", story).meta
    assert (meta.approval_request, meta.approved_hash, meta.approvals) == (None, "h1", None)
    story += [move(State.QUEUED, State.RUNNING, attempt=1, worker="w"), asks(QUESTION)]
    assert rebuild_job("q", story).meta.approval_request == QUESTION
    story += [approved(QUESTION)]
    meta = rebuild_job("q", story).meta
    assert (meta.approval_request, meta.approved_hash) == (None, "h1")
    assert meta.approvals == {"ship?": Approval("a2", ("ann", "bob"), 5)}


def test_without_a_yes_nothing_is_allowed() -> None:
    withdrawn = move(State.WAITING_APPROVAL, State.QUEUED, "approval.withdrawn", data={"actor": "x"})
    for leaving in (withdrawn, approved(QUESTION)):
        meta = rebuild_job("q", [held(), leaving]).meta
        assert (meta.approval_request, meta.approved_hash, meta.approvals) == (None, "", None)


def test_a_job_that_was_made_due_waits_no_more() -> None:
    story = [created(run_at_ms=50), move(None, None, EXPEDITED_EVENT)]
    view = rebuild_job("q", story)
    assert (view.state, view.next_attempt_at_ms, view.meta.run_at_ms) == (State.QUEUED, 0, 0)
