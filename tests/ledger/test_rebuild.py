"""Rebuilding a job from its events gives the engine's job: after every step of random histories, on both engines."""

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

from holdfast.core.job import Approval, ApprovalRequest, Envelope, Event, JobInfo, Meta
from holdfast.core.rebuild import IncompleteHistory, rebuild_job
from holdfast.core.retry import Retry
from holdfast.core.states import EXPEDITED_EVENT, FINAL, FORKED_EVENT, RESTORED_EVENT, State
from holdfast.testing.state_machine import EngineMachine
from tests.engine.harness import RedisHarness, SqliteHarness
from tests.engine.test_model import EngineRig

EXAMPLES: Final = int(os.environ.get("HOLDFAST_TEST_HISTORY_EXAMPLES", "25"))

#: States in which the failure is the reason for the state.
_FAILURE_STATES: Final = (State.RETRYING, State.DLQ_PENDING)


class RebuildMachine(EngineMachine):
    """The machine of the engine contract, with a check of `rebuild_job` after every step."""

    aged = False

    def _envelope(self, number: int, *arguments: Any, **fields: Any) -> Envelope:
        envelope = super()._envelope(number, *arguments, **fields)
        policy = msgspec.structs.replace(envelope.meta, retry=Retry(max_retries=number), context={"n": number})
        return msgspec.structs.replace(envelope, meta=policy, trace_id=f"trace-{number}")

    @invariant()
    def events_rebuild_the_job(self) -> None:
        histories: dict[str, list[Event]] = {}
        for event in self._events():
            histories.setdefault(event.job_id, []).append(event)
        infos = self._run(self.engine.get(self.queue, list(self.model.jobs)))
        now_ms = self._run(self.engine.now_ms())
        for info in infos:
            if info is not None and info.state is State.CANCELLED:
                assert rebuild_job(self.queue, histories[info.job_id]).failure == info.failure
            if info is not None and info.state not in FINAL:
                rebuilt = rebuild_job(self.queue, histories[info.job_id])
                expected, actual = comparable(info, now_ms), comparable(rebuilt, now_ms)
                if self.aged and self.model.now:
                    # The clock of Redis cannot be set: delayed jobs were made older, which the feed does not show.
                    del expected["due"], actual["due"]
                assert actual == expected, histories[info.job_id]
                assert rebuilt.meta.lost_leases >= info.meta.lost_leases >= 0


def comparable(info: JobInfo, now_ms: int) -> dict[str, Any]:
    """The fields that a restore needs, in a form that is equal for engine and rebuilt job."""
    meta = info.meta
    return {
        "identity": (info.job_id, info.task, info.queue, info.tenant_id, info.trace_id),
        "key": info.idempotency_key or info.job_id,
        "payload": info.payload,
        "state": info.state,
        "attempt": info.attempt,
        "worker": info.worker if info.state is State.RUNNING else "",
        "retry_count": meta.retry_count,
        # On one engine, a running job's info excludes the leases lost before its current one.
        "lost_leases": None if info.state is State.RUNNING else meta.lost_leases,
        "approvals": (meta.approval_request, meta.approved_hash, meta.approvals),
        "outage": (meta.unavailable_count, meta.unavailable_since_ms),
        "policy": (meta.priority, meta.retry, meta.max_retries, meta.context),
        # The end of an attempt is the worker's estimate in one and the engine's time in the other.
        "history": [(a.number, a.worker, a.started_at_ms, a.outcome, a.failure) for a in meta.history],
        "failure": info.failure if info.state in _FAILURE_STATES else None,
        # A due job may be ready by now.
        "due": info.next_attempt_at_ms if info.next_attempt_at_ms > now_ms else 0,
        "created_at": info.created_at_ms,
    }


def explore(harness: SqliteHarness | RedisHarness, examples: int) -> None:
    with asyncio.Runner() as runner:
        aged = isinstance(harness, RedisHarness)
        machine = type("Machine", (RebuildMachine,), {"world": EngineRig(harness, runner), "aged": aged})
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
def test_rebuilt_jobs_equal_those_of_sqlite(tmp_path: Path) -> None:
    explore(SqliteHarness(tmp_path / "holdfast.db"), EXAMPLES)


@pytest.mark.redis
@pytest.mark.search
@pytest.mark.timeout(1_800)
def test_rebuilt_jobs_equal_those_of_redis(redis_url: str) -> None:
    explore(RedisHarness(redis_url, f"history-{secrets.token_hex(4)}"), EXAMPLES)


# Edge cases ----------------------------------------------------------------------------------------


def move(from_state: State | None, to_state: State | None, name: str = "", **fields: Any) -> Event:
    return Event(type=name or "task.moved", job_id="j", at_ms=1, from_state=from_state, to_state=to_state, **fields)


def created(**data: Any) -> Event:
    return move(None, State.QUEUED, data={"task": "t", "payload": "{}", "idempotency_key": "j", **data})


def test_a_history_without_its_creation_event_is_refused() -> None:
    with pytest.raises(IncompleteHistory):
        rebuild_job("q", [])
    with pytest.raises(IncompleteHistory):
        rebuild_job("q", [move(State.QUEUED, State.RUNNING)])
    # Written by a projector that missed the creation event.
    with pytest.raises(IncompleteHistory):
        rebuild_job("q", [created(task="unknown", payload="null")])


def test_a_fork_resets_the_job_to_the_engines_state() -> None:
    events = [
        created(),
        move(State.QUEUED, State.RUNNING, attempt=1, worker="a"),
        move(State.RUNNING, State.RETRYING, attempt=1, retry_count=1, data={"code": "E", "message": "m"}),
        move(State.RETRYING, State.RUNNING, attempt=2, retry_count=1, worker="a"),
        move(State.RUNNING, State.QUEUED, FORKED_EVENT, attempt=0),
        move(State.QUEUED, State.RUNNING, attempt=1, worker="b"),
    ]
    info = rebuild_job("q", events)
    assert (info.state, info.attempt, info.meta.retry_count, info.meta.history) == (State.RUNNING, 1, 0, ())


def test_a_fork_in_the_same_state_resets_the_attempt() -> None:
    failed = {"code": "E", "message": "m"}
    events = [
        created(),
        move(State.QUEUED, State.RUNNING, attempt=1, worker="a"),
        move(State.RUNNING, State.RETRYING, attempt=1, retry_count=1, data=failed),
        move(State.RETRYING, State.RUNNING, attempt=2, retry_count=1, worker="a"),
        move(State.RUNNING, State.RETRYING, attempt=2, retry_count=2, data=failed),
        move(State.RETRYING, State.RETRYING, FORKED_EVENT, attempt=1, retry_count=1),
    ]
    info = rebuild_job("q", events)
    assert (info.state, info.attempt, info.meta.retry_count) == (State.RETRYING, 1, 1)
    assert [attempt.number for attempt in info.meta.history] == [1]


def test_a_restored_job_continues_from_its_state() -> None:
    events = [
        created(),
        move(State.QUEUED, State.RUNNING, attempt=1, worker="a"),
        move(State.RUNNING, State.QUEUED, RESTORED_EVENT, attempt=1),
    ]
    info = rebuild_job("q", events)
    assert (info.state, info.attempt, info.worker, info.meta.lost_leases) == (State.QUEUED, 1, "", 0)
    later = [*events, move(State.QUEUED, State.RUNNING, attempt=2, worker="b"), move(None, None, "task.heartbeat")]
    assert rebuild_job("q", later).attempt == 2


def test_the_policy_is_rebuilt_as_submitted() -> None:
    meta = Meta(retry=Retry(max_retries=7), max_retries=3, context={"a": [1]})
    text = msgspec.json.encode(meta).decode()
    for encoded in (text, msgspec.json.decode(text)):
        info = rebuild_job("q", [created(meta=encoded, priority=2)])
        assert info.meta == msgspec.structs.replace(meta, priority=2)


# Approvals -----------------------------------------------------------------------------------------

GUARD_REQUEST = ApprovalRequest(approval_id="a1", payload_hash="h1", quorum=2)
TASK_REQUEST = ApprovalRequest(approval_id="a2", payload_hash="h2", name="ship?")


def held() -> Event:
    meta = msgspec.json.encode(Meta(approval_request=GUARD_REQUEST)).decode()
    data = {"task": "t", "payload": "{}", "idempotency_key": "j", "meta": meta}
    return move(None, State.WAITING_APPROVAL, "approval.requested", data=data)


def approved(request: ApprovalRequest, at_ms: int = 5) -> Event:
    approval = Approval(request.approval_id, ("ann", "bob"), at_ms)
    data = {"actor": "bob", "reason": "", "approval": msgspec.to_builtins(approval)}
    return move(State.WAITING_APPROVAL, State.QUEUED, "approval.approved", data=data)


def requested(request: ApprovalRequest) -> Event:
    data = {"message": "?", "approval_request": msgspec.to_builtins(request)}
    return move(State.RUNNING, State.WAITING_APPROVAL, "approval.requested", attempt=1, data=data)


def test_approval_requests_and_approvals_are_rebuilt() -> None:
    events = [held()]
    assert rebuild_job("q", events).meta.approval_request == GUARD_REQUEST
    events += [approved(GUARD_REQUEST)]
    meta = rebuild_job("q", events).meta
    assert (meta.approval_request, meta.approved_hash, meta.approvals) == (None, "h1", None)
    events += [move(State.QUEUED, State.RUNNING, attempt=1, worker="w"), requested(TASK_REQUEST)]
    assert rebuild_job("q", events).meta.approval_request == TASK_REQUEST
    events += [approved(TASK_REQUEST)]
    meta = rebuild_job("q", events).meta
    assert (meta.approval_request, meta.approved_hash) == (None, "h1")
    assert meta.approvals == {"ship?": Approval("a2", ("ann", "bob"), 5)}


def test_without_an_approval_nothing_is_approved() -> None:
    withdrawn = move(State.WAITING_APPROVAL, State.QUEUED, "approval.withdrawn", data={"actor": "x"})
    for event in (withdrawn, approved(TASK_REQUEST)):
        meta = rebuild_job("q", [held(), event]).meta
        assert (meta.approval_request, meta.approved_hash, meta.approvals) == (None, "", None)


def test_an_expedited_job_is_due_now() -> None:
    events = [created(run_at_ms=50), move(None, None, EXPEDITED_EVENT)]
    info = rebuild_job("q", events)
    assert (info.state, info.next_attempt_at_ms, info.meta.run_at_ms) == (State.QUEUED, 0, 0)
