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
from tests.triggers.properties.memory_rig import PROPERTY, START, Script, World, gate_of, play, rest, until
from tests.triggers.properties.strategies import EVENTS, FOCUSES, HEADER_NAMES, HEADERS, JSON, TENANTS, same
from tests.triggers.rig import Recorder, Rig

pytestmark = pytest.mark.search

POLICIES: Final = st.sampled_from(["ack", "nack", "requeue", "dlq"])

# 7: one failing message does not stop the next -----------------------------------------------------------


class _Odd(Exception):
    """Cannot even be written down."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


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
_ENDS: Final = {
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

    async def story() -> None:
        scripts: dict[int, list[BaseException]] = {}
        for number, plan in enumerate(plans):
            tries = {"later": 1, "never": 99}.get(plan.fate, 0)
            scripts[number] = [Fatal("no")] if plan.fate == "fatal" else [plan.raised() for _ in range(tries)]
        runtime = Script(scripts)
        world = World(runtime, concurrency=concurrency, ack_policy=policy, max_retries=2, gate=gate_of(budget))
        ids = [
            world.write(b"{" if plan.fate == "unreadable" else number, plan.key, {"x-event-name": f"{plan.fate}"})
            for number, plan in enumerate(plans)
        ]
        async with world.trigger:
            await rest()
            # Nobody's clock has moved: all that need not wait for a retry are off, even with a single worker.
            at_once = {number for number, plan in enumerate(plans) if _needs_no_wait(plans, number)}
            assert {number for number in runtime.ran if plans[number].fate == "good"} >= {
                number for number in at_once if plans[number].fate == "good"
            }
            assert world.taken_care_of >= len(at_once)
            await world.off(len(plans))
            assert {row.message_id: row.status for row in await _rows(world, len(plans))} == {
                message_id: _ENDS[plan.fate] for message_id, plan in zip(ids, plans, strict=True)
            }
            # Order per key, through all of it.
            for key in "ab":
                mine = [number for number in runtime.ran if plans[number].key == key]
                assert mine == sorted(mine)
            # It is as well as before, and takes the next one.
            health = await world.trigger.health()
            assert (health.status, health.active_workers, world.trigger.in_flight) == ("healthy", concurrency, 0)
            world.write(1_000)
            await world.off(len(plans) + 1)
            assert runtime.ran[-1] == 1_000
        assert await world.adapter.lag() == 0
        world.close()

    play(story())


def _needs_no_wait(plans: list[_Plan], number: int) -> bool:
    waits = {"later", "never"}
    if plans[number].fate in waits:
        return False
    key = plans[number].key
    return not key or all(plan.fate not in waits for plan in plans[:number] if plan.key == key)


async def _rows(world: World, count: int) -> list[Any]:
    """Records are written a moment later."""
    await until(lambda: len(world.rows) >= count, "records")
    return world.rows


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
    """In every try."""
    calls: list[tuple[Any, ...]] = []

    async def function(*arguments: Any) -> str:
        calls.append(arguments)
        if len(calls) <= failures:
            raise RuntimeError("not yet")
        return "run-7"

    async def story() -> None:
        runtime: Runtime = CallableRuntime(function) if kind == "callable" else _Plain(function)
        world = World(runtime, queue_name=queue, focus=focus)
        sent = headers | {"x-event-name": event, "x-tenant-id": tenant}
        message_id = world.write(value, headers=sent)
        await world.run(1)
        world.close()
        assert len(calls) == failures + 1
        for event_name, context, got_focus, tenant_id in calls:
            assert (event_name, got_focus, tenant_id) == (event, focus, tenant)
            assert set(context) == _FIELDS
            assert same(context["message"], value)
            assert (context["headers"], context["source"], context["message_id"]) == (sent, queue, message_id)
            assert datetime.fromisoformat(context["received_at"]) == START
        assert [row.agent_run_id for row in world.rows] == ["run-7"]

    play(story())


class _Plain(Runtime):
    """Nothing but the port."""

    def __init__(self, function: Any) -> None:
        self._function = function

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        answer: str = await self._function(event_name, context, focus, tenant_id)
        return answer


def test_property_08_a_job_gets_the_full_context() -> None:
    """The same with a task as the runtime: what is in the engine once the message is acknowledged."""
    with asyncio.Runner() as runner:
        app = Holdfast("sqlite://")

        @app.task
        async def handle(
            message: Any, headers: Any, source: str, message_id: str, received_at: str, event_name: str, focus: Any
        ) -> None: ...

        @PROPERTY
        @given(value=JSON, headers=HEADERS, event=EVENTS, tenant=TENANTS, focus=FOCUSES)
        def check(value: Any, headers: dict[str, str], event: str, tenant: str, focus: str | None) -> None:
            async def story() -> None:
                rig = Rig(TaskRuntime(app, "handle"), focus=focus, enable_dedup=False)
                sent = headers | {"x-event-name": event, "x-tenant-id": tenant}
                message_id = rig.broker.write("orders", json.dumps(value).encode(), sent)
                await rig.run(1)
                (row,) = rig.rows
                view = await (await backend_of(app).submitter()).get("default", row.agent_run_id)
                assert view is not None
                assert (view.task, view.tenant_id, view.trace_id) == ("handle", tenant, row.trace_id)
                arguments = decode_json(view.payload, "the payload")
                assert same(arguments["message"], value)
                assert set(arguments) == _FIELDS | {"event_name", "focus"}
                assert (arguments["headers"], arguments["source"]) == (sent, "orders")
                assert (arguments["message_id"], arguments["event_name"]) == (message_id, event)
                assert arguments["focus"] == focus
                assert datetime.fromisoformat(arguments["received_at"]).tzinfo is not None

            runner.run(story())

        async def open_() -> None:
            await backend_of(app).submitter()

        runner.run(open_())
        try:
            check()
        finally:
            runner.run(app.close())


# 9: event name from header or config, focus passed on ----------------------------------------------------


class _Routed(NamedTuple):
    #: In the configured header, in the usual one, and as the type of a CloudEvent.
    header: str | None
    usual: str | None
    type: str


_NAMES: Final = st.none() | EVENTS | EVENTS.map(lambda name: f" {name}\t") | st.just("")


@PROPERTY
@given(
    routed=st.lists(st.builds(_Routed, _NAMES, st.none() | EVENTS, EVENTS), min_size=1, max_size=4),
    header=st.none() | HEADER_NAMES.map(lambda name: "H-" + name),
    focus=FOCUSES,
    cloud=st.booleans(),
)
def test_property_09_the_event_name_is_the_headers_or_the_configurations(
    routed: list[_Routed], header: str | None, focus: str | None, cloud: bool
) -> None:
    async def story() -> None:
        runtime = Recorder()
        config: dict[str, Any] = {"parser_type": "cloudevents"} if cloud else {}
        if header is not None:
            config["event_name_header"] = header
        world = World(runtime, focus=focus, **config)
        expected = []
        for number, one in enumerate(routed):
            headers = {} if one.usual is None else {"X-Event-Name": one.usual}
            if one.header is not None:
                headers = {**headers, header: one.header} if header is not None else {"x-event-name": one.header}
            told = one.header if header is not None or one.header is not None else one.usual
            expected.append((told or "").strip() or (one.type if cloud else "queue_message"))
            body = {"specversion": "1.0", "id": str(number), "source": "/", "type": one.type, "data": number}
            world.write(body if cloud else number, headers=headers)
        await world.run(len(routed))
        world.close()
        assert [(event, context["message"], given_focus) for event, context, given_focus, _ in runtime.calls] == [
            (event, number, focus) for number, event in enumerate(expected)
        ]
        assert sorted(row.event_name for row in world.rows) == sorted(expected)

    play(story())


# 10: the guard is asked before every run; denial follows the policy and is recorded ----------------------


class _Case(NamedTuple):
    #: What the guard says, ask after ask; then it does not mind.
    answers: tuple[str, ...]
    failures: int
    tenant: str


_ANSWERS: Final = st.lists(st.sampled_from(["deny", "people", "allow"]), max_size=2).map(tuple)


@PROPERTY
@given(
    cases=st.lists(st.builds(_Case, _ANSWERS, st.integers(0, 2), TENANTS), min_size=1, max_size=4),
    policy=POLICIES,
    reason=st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=20),
)
def test_property_10_the_guard_is_asked_before_every_run(cases: list[_Case], policy: str, reason: str) -> None:
    async def story() -> None:
        log: list[tuple[str, int]] = []
        left = {number: list(case.answers) for number, case in enumerate(cases)}

        async def guard(request: GuardRequest) -> Decision | None:
            number = request.arguments["message"]
            log.append(("ask", number))
            assert (request.source, request.queue, request.tenant_id) == ("trigger", "orders", cases[number].tenant)
            assert (request.task, request.arguments["event_name"]) == (f"event-{number}", f"event-{number}")
            assert set(request.arguments) == _FIELDS | {"event_name", "focus"}
            match left[number].pop(0) if left[number] else "none":
                case "deny":
                    return Deny(reason)
                case "people":
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

        world = World(Recorder(act), gate=gate_of(guard), ack_policy=policy, concurrency=2)
        ids = [
            world.write(number, headers={"x-event-name": f"event-{number}", "x-tenant-id": case.tenant})
            for number, case in enumerate(cases)
        ]
        expected = [_course(case, policy) for case in cases]
        await world.run(sum(len(words) for _, words, _ in expected))
        for number, (entries, words, denied) in enumerate(expected):
            assert [word for word, of in log if of == number] == entries
            assert world.words(ids[number]) == words
            rows = [row for row in world.rows if row.message_id == ids[number]]
            # Denied twice is the same outcome twice, and one row.
            ends = [ExecutionStatus.REJECTED] * bool(denied) + [ExecutionStatus.SUCCESS] * (entries[-1] == "run")
            assert sorted(row.status for row in rows) == sorted(ends)
            for row in rows:
                assert row.tenant_id == cases[number].tenant
                assert row.status is ExecutionStatus.SUCCESS or reason in row.error_message
        for letter in world.dead:
            assert reason in letter.headers["x-dead-reason"]
        world.close()

    play(story())


def _course(case: _Case, policy: str) -> tuple[list[str], list[str], int]:
    """What happens to a message: asks and runs, what the broker is told, and how often it is denied."""
    entries: list[str] = []
    words: list[str] = []
    answers, failures, denied = list(case.answers), case.failures, 0
    while True:
        entries.append("ask")
        if answers and answers.pop(0) != "allow":
            denied += 1
            words.append(policy)
            if policy != "requeue":
                return entries, words, denied
            continue
        entries.append("run")
        if not failures:
            return entries, [*words, "ack"], denied
        failures -= 1


# 11: each ack policy does what it says, after success and failure ----------------------------------------

_OUTCOMES: Final = ("success", "later", "fatal", "denied", "exhausted", "unparsable", "duplicate")


@PROPERTY
@given(policy=POLICIES, outcomes=st.lists(st.sampled_from(_OUTCOMES), min_size=1, max_size=6), times=st.integers(1, 3))
def test_property_11_each_ack_policy_does_what_it_says(policy: str, outcomes: list[str], times: int) -> None:
    """`times`: so often is a message denied, or fails for good, before it would go well."""
    denials = dict.fromkeys(range(len(outcomes)), 0)

    async def guard(request: GuardRequest) -> Decision | None:
        number = request.arguments["message"]
        if request.task != "denied" or denials[number] >= times:
            return None
        denials[number] += 1
        return Deny("too much")

    async def story() -> None:
        errors = {"later": [RuntimeError("not yet")], "fatal": [Fatal("no")] * times, "exhausted": [OSError("x")] * 9}
        runtime = _Watched({number: errors.get(outcome, []) for number, outcome in enumerate(outcomes)})
        world = World(runtime, ack_policy=policy, max_retries=2, gate=gate_of(guard))
        runtime.world = world
        world.write("known", headers={"x-dedup-key": "known"})
        ids = [
            world.write(
                b"{" if outcome == "unparsable" else number,
                headers={"x-event-name": outcome} | ({"x-dedup-key": "known"} if outcome == "duplicate" else {}),
            )
            for number, outcome in enumerate(outcomes)
        ]
        by_policy = ["requeue"] * times + ["ack"] if policy == "requeue" else [policy]
        expected = {
            message_id: by_policy
            if outcome in ("fatal", "denied")
            else ["dlq"]
            if outcome in ("exhausted", "unparsable")
            else ["ack"]
            for message_id, outcome in zip(ids, outcomes, strict=True)
        }
        async with world.trigger:
            await world.off(1 + sum(map(len, expected.values())))
            # Nothing is left, in hand or at the broker, and nothing comes again.
            assert (await world.adapter.lag(), world.trigger.in_flight) == (0, 0)
            assert not world.adapter._deliveries
        assert {message_id: world.words(message_id) for message_id in ids} == expected
        assert not runtime.early, "acknowledged before it had run"
        # Requeued is delivered again; nothing else is.
        deliveries = {number: len(runtime.delivered.get(message_id, ())) for number, message_id in enumerate(ids)}
        for number, message_id in enumerate(ids):
            assert deliveries[number] == len(expected[message_id])
        dead = {letter.headers["x-dead-message-id"] for letter in world.dead}
        assert dead == {message_id for message_id, words in expected.items() if words == ["dlq"]}
        ran = {number for number in runtime.ran if number != "known"}
        assert ran == {
            number
            for number, outcome in enumerate(outcomes)
            if outcome in ("success", "later") or (outcome in ("fatal", "denied") and policy == "requeue")
        }
        world.close()

    play(story())


class _Watched(Script):
    """Looks whether the broker has been told of a message before it has run."""

    world: World

    def __init__(self, scripts: Mapping[Any, Any]) -> None:
        super().__init__(scripts)
        self.early: list[str] = []

    @property
    def delivered(self) -> dict[str, list[int]]:
        return self.world.adapter.delivered

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        told = [word for word, of in self.world.adapter.told if of == context["message_id"]]
        await asyncio.sleep(0.01)
        later = [word for word, of in self.world.adapter.told if of == context["message_id"]]
        if "ack" in later or len(later) != len(told):
            self.early.append(context["message_id"])
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
    async def story() -> None:
        runtime = Script({number: [RuntimeError("no")] * times for number, times in enumerate(failures)})
        world = World(
            runtime,
            retry_backoff_base=base,
            retry_backoff_multiplier=multiplier,
            max_retries=max_retries,
            concurrency=concurrency,
            # Questions every few seconds would make a day long.
            metrics={"enabled": False},
        )
        ids = [world.write(number) for number in range(len(failures))]
        await world.run(len(failures))
        world.close()
        delays: list[float] = []
        for number, times in enumerate(failures):
            retries = min(times, max_retries)
            # A day at most, however large the numbers.
            mine = [min(86_400.0, base * multiplier**n) for n in range(retries)]
            delays += mine
            tries = runtime.tries[number]
            assert len(tries) == 1 + retries
            assert [later - earlier for earlier, later in pairwise(tries)] == pytest.approx(mine, abs=1e-3)
            (row,) = [row for row in world.rows if row.message_id == ids[number]]
            assert row.retry_count == retries
            assert row.status is (ExecutionStatus.SUCCESS if times <= max_retries else ExecutionStatus.FAILED)
            assert world.words(ids[number]) == ["ack" if times <= max_retries else "dlq"]
        assert sorted(world.slept) == pytest.approx(sorted(delays))
        assert world.counts.retries == len(delays)

    play(story())
