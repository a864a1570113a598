"""Properties 7 to 12 of triggers (requirement T6): failures, context, routing, guards, policies, retries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Allow, Deny, Fatal, Holdfast, RequireApproval
from holdfast.core.codec import decode_json
from holdfast.execution.backend import backend_of
from holdfast.guard.decisions import Decision, GuardRequest
from holdfast.ledger.port.messages import ExecutionStatus
from holdfast.triggers.runtime import CallableRuntime, Runtime
from holdfast.triggers.task_runtime import TaskRuntime
from tests.triggers.properties.memory_rig import (
    PROPERTY,
    START,
    MemoryRig,
    Script,
    make_gate,
    run_example,
    until,
    wait_idle,
)
from tests.triggers.properties.strategies import EVENTS, FOCUSES, HEADER_NAMES, HEADERS, JSON, TENANTS, is_same
from tests.triggers.rig import Recorder, Rig

pytestmark = pytest.mark.search

POLICIES: Final = st.sampled_from(["ack", "nack", "requeue", "dlq"])

# 7: one failing message does not stop the next -----------------------------------------------------------


class _Odd(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class _Plan(NamedTuple):
    key: str
    #: `good`, `later` (fails once), `never`, `fatal`, `unreadable`, `denied`.
    fate: str
    error: type[BaseException] = RuntimeError

    def raised(self) -> BaseException:
        return ExceptionGroup("not now", [OSError()]) if self.error is ExceptionGroup else self.error("not now")


_ERRORS: Final = st.sampled_from([RuntimeError, KeyError, TimeoutError, asyncio.CancelledError, ExceptionGroup, _Odd])
_PLANS: Final = st.lists(
    st.builds(
        _Plan,
        st.sampled_from(["", "", "a", "b"]),
        st.sampled_from(["good", "good", "later", "never", "fatal", "unreadable", "denied"]),
        _ERRORS,
    ),
    min_size=1,
    max_size=8,
)
_STATUSES: Final = {
    "good": ExecutionStatus.SUCCESS,
    "later": ExecutionStatus.SUCCESS,
    "never": ExecutionStatus.FAILED,
    "fatal": ExecutionStatus.FAILED,
    "unreadable": ExecutionStatus.UNPARSABLE,
    "denied": ExecutionStatus.REJECTED,
}


@PROPERTY
@given(plans=_PLANS, concurrency=st.integers(1, 3), policy=st.sampled_from(["ack", "nack", "dlq"]))
def test_property_07_one_failing_message_does_not_stop_the_next(
    plans: list[_Plan], concurrency: int, policy: str
) -> None:
    async def budget(request: GuardRequest) -> Decision | None:
        return Deny("too much") if request.task == "denied" else None

    async def scenario() -> None:
        scripts: dict[int, list[BaseException]] = {}
        for number, plan in enumerate(plans):
            tries = {"later": 1, "never": 99}.get(plan.fate, 0)
            scripts[number] = [Fatal("no")] if plan.fate == "fatal" else [plan.raised() for _ in range(tries)]
        runtime = Script(scripts)
        rig = MemoryRig(runtime, concurrency=concurrency, ack_policy=policy, max_retries=2, gate=make_gate(budget))
        ids = [
            rig.write(b"{" if plan.fate == "unreadable" else number, plan.key, {"x-event-name": f"{plan.fate}"})
            for number, plan in enumerate(plans)
        ]
        async with rig.trigger:
            await wait_idle()
            # The clock has not moved: all messages without a retry are handled, even with a single worker.
            at_once = {number for number, plan in enumerate(plans) if _needs_no_wait(plans, number)}
            assert {number for number in runtime.ran if plans[number].fate == "good"} >= {
                number for number in at_once if plans[number].fate == "good"
            }
            assert rig.handled >= len(at_once)
            await rig.wait_handled(len(plans))
            assert {row.message_id: row.status for row in await _rows(rig, len(plans))} == {
                message_id: _STATUSES[plan.fate] for message_id, plan in zip(ids, plans, strict=True)
            }
            # The order per key is kept.
            for key in "ab":
                mine = [number for number in runtime.ran if plans[number].key == key]
                assert mine == sorted(mine)
            # The trigger is healthy and handles the next message.
            health = await rig.trigger.health()
            assert (health.status, health.active_workers, rig.trigger.in_flight) == ("healthy", concurrency, 0)
            rig.write(1_000)
            await rig.wait_handled(len(plans) + 1)
            assert runtime.ran[-1] == 1_000
        assert await rig.adapter.lag() == 0
        rig.close()

    run_example(scenario())


def _needs_no_wait(plans: list[_Plan], number: int) -> bool:
    waits = {"later", "never"}
    if plans[number].fate in waits:
        return False
    key = plans[number].key
    return not key or all(plan.fate not in waits for plan in plans[:number] if plan.key == key)


async def _rows(rig: MemoryRig, count: int) -> list[Any]:
    """Wait for the records, which are written asynchronously."""
    await until(lambda: len(rig.rows) >= count, "records")
    return rig.rows


# 8: the runtime gets the full context --------------------------------------------------------------------

_FIELDS: Final = {"message", "headers", "source", "message_id", "received_at"}


@PROPERTY
@given(
    value=JSON,
    headers=HEADERS,
    event=EVENTS,
    tenant=TENANTS,
    focus=FOCUSES,
    queue=st.text("abc.-", min_size=1, max_size=10),
    kind=st.sampled_from(["runtime", "callable"]),
    failures=st.integers(0, 2),
)
def test_property_08_the_runtime_gets_the_full_context(
    value: Any,
    headers: dict[str, str],
    event: str,
    tenant: str,
    focus: str | None,
    queue: str,
    kind: str,
    failures: int,
) -> None:
    """In every attempt."""
    calls: list[tuple[Any, ...]] = []

    async def function(*arguments: Any) -> str:
        calls.append(arguments)
        if len(calls) <= failures:
            raise RuntimeError("not yet")
        return "run-7"

    async def scenario() -> None:
        runtime: Runtime = CallableRuntime(function) if kind == "callable" else _Plain(function)
        rig = MemoryRig(runtime, queue_name=queue, focus=focus)
        sent = headers | {"x-event-name": event, "x-tenant-id": tenant}
        message_id = rig.write(value, headers=sent)
        await rig.run(1)
        rig.close()
        assert len(calls) == failures + 1
        for event_name, context, actual_focus, tenant_id in calls:
            assert (event_name, actual_focus, tenant_id) == (event, focus, tenant)
            assert set(context) == _FIELDS
            assert is_same(context["message"], value)
            assert (context["headers"], context["source"], context["message_id"]) == (sent, queue, message_id)
            assert datetime.fromisoformat(context["received_at"]) == START
        assert [row.agent_run_id for row in rig.rows] == ["run-7"]

    run_example(scenario())


class _Plain(Runtime):
    """Implements only the port."""

    def __init__(self, function: Any) -> None:
        self._function = function

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        answer: str = await self._function(event_name, context, focus, tenant_id)
        return answer


def test_property_08_a_job_gets_the_full_context() -> None:
    """With a task as the runtime: the job in the engine once the message is acknowledged."""
    with asyncio.Runner() as runner:
        app = Holdfast("sqlite://")

        @app.task
        async def handle(
            message: Any, headers: Any, source: str, message_id: str, received_at: str, event_name: str, focus: Any
        ) -> None: ...

        @PROPERTY
        @given(value=JSON, headers=HEADERS, event=EVENTS, tenant=TENANTS, focus=FOCUSES)
        def check(value: Any, headers: dict[str, str], event: str, tenant: str, focus: str | None) -> None:
            async def scenario() -> None:
                rig = Rig(TaskRuntime(app, "handle"), focus=focus, enable_dedup=False)
                sent = headers | {"x-event-name": event, "x-tenant-id": tenant}
                message_id = rig.broker.write("orders", json.dumps(value).encode(), sent)
                await rig.run(1)
                (row,) = rig.rows
                info = await (await backend_of(app).connections.submitter()).get("default", row.agent_run_id)
                assert info is not None
                assert (info.task, info.tenant_id, info.trace_id) == ("handle", tenant, row.trace_id)
                arguments = decode_json(info.payload, "the payload")
                assert is_same(arguments["message"], value)
                assert set(arguments) == _FIELDS | {"event_name", "focus"}
                assert (arguments["headers"], arguments["source"]) == (sent, "orders")
                assert (arguments["message_id"], arguments["event_name"]) == (message_id, event)
                assert arguments["focus"] == focus
                assert datetime.fromisoformat(arguments["received_at"]).tzinfo is not None

            runner.run(scenario())

        async def open_() -> None:
            await backend_of(app).connections.submitter()

        runner.run(open_())
        try:
            check()
        finally:
            runner.run(app.close())


# 9: event name from header or config, focus passed on ----------------------------------------------------


class _Routed(NamedTuple):
    #: The event name in the configured header, in the default header, and as the type of a CloudEvent.
    header: str | None
    default_header: str | None
    type: str


_NAMES: Final = st.none() | EVENTS | EVENTS.map(lambda name: f" {name}\t") | st.just("")


@PROPERTY
@given(
    routed=st.lists(st.builds(_Routed, _NAMES, st.none() | EVENTS, EVENTS), min_size=1, max_size=4),
    header=st.none() | HEADER_NAMES.map(lambda name: "H-" + name),
    focus=FOCUSES,
    cloud=st.booleans(),
)
def test_property_09_the_event_name_comes_from_the_header_or_the_configuration(
    routed: list[_Routed], header: str | None, focus: str | None, cloud: bool
) -> None:
    async def scenario() -> None:
        runtime = Recorder()
        config: dict[str, Any] = {"parser_type": "cloudevents"} if cloud else {}
        if header is not None:
            config["event_name_header"] = header
        rig = MemoryRig(runtime, focus=focus, **config)
        expected = []
        for number, one in enumerate(routed):
            headers = {} if one.default_header is None else {"X-Event-Name": one.default_header}
            if one.header is not None:
                headers = {**headers, header: one.header} if header is not None else {"x-event-name": one.header}
            name = one.header if header is not None or one.header is not None else one.default_header
            expected.append((name or "").strip() or (one.type if cloud else "queue_message"))
            body = {"specversion": "1.0", "id": str(number), "source": "/", "type": one.type, "data": number}
            rig.write(body if cloud else number, headers=headers)
        await rig.run(len(routed))
        rig.close()
        assert [(event, context["message"], given_focus) for event, context, given_focus, _ in runtime.calls] == [
            (event, number, focus) for number, event in enumerate(expected)
        ]
        assert sorted(row.event_name for row in rig.rows) == sorted(expected)

    run_example(scenario())


# 10: the guard runs before every attempt; a denied message is recorded, then dead-lettered or acknowledged --


class _Case(NamedTuple):
    #: The decisions of the guard in order; afterwards it has none.
    answers: tuple[str, ...]
    failures: int
    tenant: str


_ANSWERS: Final = st.lists(st.sampled_from(["deny", "require_approval", "allow"]), max_size=2).map(tuple)


@PROPERTY
@given(
    cases=st.lists(st.builds(_Case, _ANSWERS, st.integers(0, 2), TENANTS), min_size=1, max_size=4),
    policy=POLICIES,
    reason=st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=20),
)
def test_property_10_the_guard_runs_before_every_attempt(cases: list[_Case], policy: str, reason: str) -> None:
    async def scenario() -> None:
        log: list[tuple[str, int]] = []
        left = {number: list(case.answers) for number, case in enumerate(cases)}

        async def guard(request: GuardRequest) -> Decision | None:
            number = request.arguments["message"]
            log.append(("guard", number))
            assert (request.source, request.queue, request.tenant_id) == ("trigger", "orders", cases[number].tenant)
            assert (request.task, request.arguments["event_name"]) == (f"event-{number}", f"event-{number}")
            assert set(request.arguments) == _FIELDS | {"event_name", "focus"}
            match left[number].pop(0) if left[number] else "none":
                case "deny":
                    return Deny(reason)
                case "require_approval":
                    return RequireApproval(reason)
                case "allow":
                    return Allow()
            return None

        def act(context: Mapping[str, Any]) -> str:
            number = context["message"]
            log.append(("run", number))
            if sum(entry == ("run", number) for entry in log) <= cases[number].failures:
                raise RuntimeError("not yet")
            return "run"

        rig = MemoryRig(Recorder(act), gate=make_gate(guard), ack_policy=policy, concurrency=2)
        ids = [
            rig.write(number, headers={"x-event-name": f"event-{number}", "x-tenant-id": case.tenant})
            for number, case in enumerate(cases)
        ]
        expected = [_expected_course(case, policy) for case in cases]
        await rig.run(sum(len(actions) for _, actions, _ in expected))
        for number, (entries, actions, denied) in enumerate(expected):
            assert [entry for entry, message in log if message == number] == entries
            assert rig.settle_actions(ids[number]) == actions
            rows = [row for row in rig.rows if row.message_id == ids[number]]
            statuses = [ExecutionStatus.REJECTED] * bool(denied) + [ExecutionStatus.SUCCESS] * (entries[-1] == "run")
            assert sorted(row.status for row in rows) == sorted(statuses)
            for row in rows:
                assert row.tenant_id == cases[number].tenant
                assert row.status is ExecutionStatus.SUCCESS or reason in row.error_message
        for dead_letter in rig.dead_letters:
            assert reason in dead_letter.headers["x-dead-reason"]
        rig.close()

    run_example(scenario())


def _expected_course(case: _Case, policy: str) -> tuple[list[str], list[str], int]:
    """Return what happens to a message: guard calls and runs, settle actions, and the number of denials."""
    entries: list[str] = []
    actions: list[str] = []
    answers, failures = list(case.answers), case.failures
    while True:
        entries.append("guard")
        if answers and answers.pop(0) != "allow":
            return entries, [*actions, "dlq" if policy == "dlq" else "ack"], 1
        entries.append("run")
        if not failures:
            return entries, [*actions, "ack"], 0
        failures -= 1


# 11: each ack policy settles as configured, after success and failure -------------------------------------

_OUTCOMES: Final = ("success", "later", "fatal", "denied", "exhausted", "unparsable", "duplicate")


@PROPERTY
@given(policy=POLICIES, outcomes=st.lists(st.sampled_from(_OUTCOMES), min_size=1, max_size=6), times=st.integers(1, 3))
def test_property_11_each_ack_policy_settles_as_configured(policy: str, outcomes: list[str], times: int) -> None:
    """`times`: how often a message is denied or fails permanently before it would succeed. Denial is final."""
    denials = dict.fromkeys(range(len(outcomes)), 0)

    async def guard(request: GuardRequest) -> Decision | None:
        number = request.arguments["message"]
        if request.task != "denied" or denials[number] >= times:
            return None
        denials[number] += 1
        return Deny("too much")

    async def scenario() -> None:
        errors = {"later": [RuntimeError("not yet")], "fatal": [Fatal("no")] * times, "exhausted": [OSError("x")] * 9}
        runtime = _EarlySettleCheck({number: errors.get(outcome, []) for number, outcome in enumerate(outcomes)})
        rig = MemoryRig(runtime, ack_policy=policy, max_retries=2, gate=make_gate(guard))
        runtime.rig = rig
        rig.write("known", headers={"x-dedup-key": "known"})
        ids = [
            rig.write(
                b"{" if outcome == "unparsable" else number,
                headers={"x-event-name": outcome} | ({"x-dedup-key": "known"} if outcome == "duplicate" else {}),
            )
            for number, outcome in enumerate(outcomes)
        ]
        by_policy = ["requeue"] * times + ["ack"] if policy == "requeue" else [policy]
        expected = {
            message_id: by_policy
            if outcome == "fatal"
            else ["dlq" if policy == "dlq" else "ack"]
            if outcome == "denied"
            else ["dlq"]
            if outcome in ("exhausted", "unparsable")
            else ["ack"]
            for message_id, outcome in zip(ids, outcomes, strict=True)
        }
        async with rig.trigger:
            await rig.wait_handled(1 + sum(map(len, expected.values())))
            # No message is left, neither in flight nor at the broker, and none is redelivered.
            assert (await rig.adapter.lag(), rig.trigger.in_flight) == (0, 0)
            assert not rig.adapter._deliveries
        assert {message_id: rig.settle_actions(message_id) for message_id in ids} == expected
        assert not runtime.settled_early, "acknowledged before it had run"
        # Only requeued messages are redelivered.
        deliveries = {number: len(runtime.delivered.get(message_id, ())) for number, message_id in enumerate(ids)}
        for number, message_id in enumerate(ids):
            assert deliveries[number] == len(expected[message_id])
        dead_lettered = {dead_letter.headers["x-dead-message-id"] for dead_letter in rig.dead_letters}
        assert dead_lettered == {message_id for message_id, actions in expected.items() if actions == ["dlq"]}
        ran = {number for number in runtime.ran if number != "known"}
        assert ran == {
            number
            for number, outcome in enumerate(outcomes)
            if outcome in ("success", "later") or (outcome == "fatal" and policy == "requeue")
        }
        rig.close()

    run_example(scenario())


class _EarlySettleCheck(Script):
    """Records messages that are settled before they have run."""

    rig: MemoryRig

    def __init__(self, scripts: Mapping[Any, Any]) -> None:
        super().__init__(scripts)
        self.settled_early: list[str] = []

    @property
    def delivered(self) -> dict[str, list[int]]:
        return self.rig.adapter.delivered

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        before = [action for action, settled_id in self.rig.adapter.settle_calls if settled_id == context["message_id"]]
        await asyncio.sleep(0.01)
        after = [action for action, settled_id in self.rig.adapter.settle_calls if settled_id == context["message_id"]]
        if "ack" in after or len(after) != len(before):
            self.settled_early.append(context["message_id"])
        return await super().trigger_event(event_name, context, focus, tenant_id)


# 12: retry delays follow base × multiplier^n -------------------------------------------------------------


@PROPERTY
@given(
    base=st.floats(0.001, 100),
    multiplier=st.floats(1, 10),
    max_retries=st.integers(0, 8),
    failures=st.lists(st.integers(0, 10), min_size=1, max_size=4),
    concurrency=st.integers(1, 3),
)
def test_property_12_retry_delays_follow_base_times_multiplier_to_the_n(
    base: float, multiplier: float, max_retries: int, failures: list[int], concurrency: int
) -> None:
    async def scenario() -> None:
        runtime = Script({number: [RuntimeError("no")] * times for number, times in enumerate(failures)})
        rig = MemoryRig(
            runtime,
            retry_backoff_base=base,
            retry_backoff_multiplier=multiplier,
            max_retries=max_retries,
            concurrency=concurrency,
            # Reading the lag every few seconds would make a virtual day slow.
            metrics={"enabled": False},
        )
        ids = [rig.write(number) for number in range(len(failures))]
        await rig.run(len(failures))
        rig.close()
        delays: list[float] = []
        for number, times in enumerate(failures):
            retries = min(times, max_retries)
            # A delay is at most a day.
            mine = [min(86_400.0, base * multiplier**n) for n in range(retries)]
            delays += mine
            tries = runtime.tries[number]
            assert len(tries) == 1 + retries
            assert [later - earlier for earlier, later in pairwise(tries)] == pytest.approx(mine, abs=1e-3)
            (row,) = [row for row in rig.rows if row.message_id == ids[number]]
            assert row.retry_count == retries
            assert row.status is (ExecutionStatus.SUCCESS if times <= max_retries else ExecutionStatus.FAILED)
            assert rig.settle_actions(ids[number]) == ["ack" if times <= max_retries else "dlq"]
        assert sorted(rig.slept) == pytest.approx(sorted(delays))
        assert rig.counts.retries == len(delays)

    run_example(scenario())
