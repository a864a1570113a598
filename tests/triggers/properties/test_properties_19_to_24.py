"""Properties 19 to 24 of triggers (requirement T6): metrics, tenants, logs, health, secrets, stopping."""

from __future__ import annotations

import asyncio
import json
import string
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final
from urllib.parse import quote

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast import Deny, Fatal, Unavailable
from holdfast.brokers.factory import BROKER_TYPES, build_adapter, build_publisher, connection_model
from holdfast.brokers.port import RawMessage
from holdfast.errors import BrokerUnavailable, InvalidOption
from holdfast.guard.decisions import Decision, GuardRequest
from holdfast.guard.registry import GuardRegistry
from holdfast.guard.runner import GuardRunner
from holdfast.observe.counters import BOUNDS_S
from holdfast.triggers.config import QueueTriggerConfig, TriggerEntry
from holdfast.triggers.dedup import InMemoryIdempotencyStore
from holdfast.triggers.http_runtime import HttpRuntime
from holdfast.triggers.runtime import CallableRuntime
from holdfast.triggers.state import TriggerState
from holdfast.triggers.trigger import QueueTrigger
from tests.triggers.properties.leaks import (
    assert_no_secrets,
    echo_server,
    error_texts,
    invalid_connections,
    logged_texts,
    make_connection,
    secret_fields,
)
from tests.triggers.properties.memory_rig import PROPERTY, LoopClock, MemoryRig, run_example, wait_idle
from tests.triggers.properties.store_rig import KINDS, Kind, LogCapture, Store, TriggerRig, open_store, scrape_metrics
from tests.triggers.rig import Recorder

pytestmark = pytest.mark.search

WORDS: Final = st.text(string.ascii_letters, min_size=1, max_size=12)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(tmp_path_factory.mktemp("store")) as store:
        yield store


# 19: metrics ---------------------------------------------------------------------------------------------


def histogram(name: str, seconds: Sequence[float]) -> dict[str, Any]:
    """Return the samples of a histogram."""
    buckets = [0] * (len(BOUNDS_S) + 1)
    for each in seconds:
        buckets[bisect_left(BOUNDS_S, each)] += 1
    bounds = [f"{bound:g}" for bound in BOUNDS_S] + ["+Inf"]
    found: dict[str, Any] = {
        f'{name}_bucket{{le="{bound}",queue="orders"}}': number
        for bound, number in zip(bounds, accumulate(buckets), strict=True)
    }
    return found | {
        f'{name}_count{{queue="orders"}}': len(seconds),
        f'{name}_sum{{queue="orders"}}': pytest.approx(sum(seconds), abs=1e-5),
    }


@PROPERTY
@given(
    plans=st.lists(
        st.tuples(
            st.sampled_from(["runs", "retries", "exhausted", "fatal", "unparsable", "again"]),
            st.integers(0, 90_000),
            st.integers(0, 40_000),
        ),
        max_size=8,
    ),
    concurrency=st.integers(1, 4),
    max_retries=st.integers(1, 3),
)
def test_property_19_metrics_of_delay_duration_and_calls_are_exact(
    plans: list[tuple[str, int, int]], concurrency: int, max_retries: int
) -> None:
    """As Prometheus reads them. Each message waits before it is received and takes time to run."""

    async def scenario() -> None:
        clock, started, ended = LoopClock(), dict[str, int](), dict[str, int]()
        calls = 0
        tried: Counter[str] = Counter()

        async def act(context: Mapping[str, Any]) -> str:
            nonlocal calls
            calls += 1
            fate, _, takes_ms = plans[context["message"]]
            message_id = context["message_id"]
            tried[message_id] += 1
            await asyncio.sleep(takes_ms / 1000)
            if fate == "fatal":
                raise Fatal("never")
            if fate == "exhausted" or (fate == "retries" and tried[message_id] == 1):
                raise RuntimeError("not yet")
            return "run"

        rig = MemoryRig(Recorder(act), concurrency=concurrency, prefetch=100, max_retries=max_retries)
        record_times(rig, started, ended)
        written: list[int] = []
        expected: Counter[str] = Counter(dict.fromkeys(("success", "duplicate", "rejected", "unparsable", "failed"), 0))
        for number, (fate, apart_ms, _) in enumerate(plans):
            for copy in range(2 if fate == "again" else 1):
                rig.write(b"{" if fate == "unparsable" else number, headers={"x-dedup-key": str(number)})
                written.append(clock.now_ms())
                expected[_status(fate, copy)] += 1
            await asyncio.sleep(apart_ms / 1000)
        received = clock.now_ms()
        await rig.trigger.start()
        await rig.wait_handled(len(written))
        metrics = scrape_metrics(rig.counts)
        assert {name: value for name, value in metrics.items() if "queue_consumer_lag" not in name} == {
            **histogram("queue_consume_delay_seconds", [received / 1000 - each / 1000 for each in written]),
            **histogram(
                "queue_processing_duration_seconds", [ended[each] / 1000 - started[each] / 1000 for each in ended]
            ),
            **{
                f'queue_messages_consumed_total{{queue="orders",status="{status}"}}': number
                for status, number in expected.items()
            },
            'queue_runtime_calls_total{queue="orders"}': calls,
            'queue_dedup_hits_total{queue="orders"}': expected["duplicate"],
            'queue_active_workers{queue="orders"}': concurrency,
        }
        await rig.trigger.stop()
        assert scrape_metrics(rig.counts)['queue_active_workers{queue="orders"}'] == 0
        rig.close()

    run_example(scenario())


def record_times(rig: MemoryRig, started: dict[str, int], ended: dict[str, int]) -> None:
    """Record when each message is started and when it is settled, by the virtual clock."""
    adapter = rig.adapter
    owns, ack, send_to_dlq = adapter.owns, adapter.ack, adapter.send_to_dlq

    def recording_owns(message: RawMessage) -> bool:
        started.setdefault(message.message_id, rig.clock.now_ms())
        return owns(message)

    async def recording_ack(message: RawMessage) -> None:
        ended[message.message_id] = rig.clock.now_ms()
        await ack(message)

    async def recording_send(message: RawMessage, reason: str, history: Sequence[str] = ()) -> None:
        ended[message.message_id] = rig.clock.now_ms()
        await send_to_dlq(message, reason, history)

    adapter.owns, adapter.ack, adapter.send_to_dlq = recording_owns, recording_ack, recording_send  # type: ignore[method-assign]


def _status(fate: str, copy: int) -> str:
    if fate in ("fatal", "exhausted"):
        return "failed"
    return "unparsable" if fate == "unparsable" else "duplicate" if copy else "success"


# 20: tenants ---------------------------------------------------------------------------------------------


@PROPERTY
@given(
    kind=st.sampled_from(KINDS),
    messages=st.lists(
        st.tuples(st.sampled_from([None, "acme", "Zürich-é", "a b"]), st.sampled_from(["k1", "k2"])),
        min_size=1,
        max_size=8,
    ),
    poisoned=st.sets(st.sampled_from(["default", "acme"]), max_size=1),
    concurrency=st.integers(1, 3),
)
def test_property_20_tenants_are_isolated(
    store: Store, kind: Kind, messages: list[tuple[str | None, str]], poisoned: set[str], concurrency: int
) -> None:
    """Keys and failures are separate per tenant; messages with an invalid tenant become dead letters."""

    async def act(_: str, context: Mapping[str, Any], __: str | None, tenant_id: str) -> str:
        if tenant_id in poisoned:
            raise Fatal("this tenant's fault")
        store.ran.append((tenant_id, context["message"]))
        return f"{tenant_id}'s run"

    async def scenario() -> None:
        rig = TriggerRig(store, kind, act, concurrency=concurrency)
        store.ran.clear()
        async with rig.trigger:
            ids = [
                rig.write(
                    [tenant or "default", key],
                    {"x-dedup-key": key} | ({} if tenant is None else {"x-tenant-id": tenant}),
                )
                for tenant, key in messages
            ]
            await rig.wait_handled(len(messages))
        await store.finish_jobs()
        failing = poisoned if kind == "callable" else set()
        good = {(tenant or "default", key) for tenant, key in messages if tenant != "a b"}
        # Each tenant and key ran once, for that tenant.
        assert Counter((tenant, *message) for tenant, message in store.ran) == dict.fromkeys(
            ((tenant, tenant, key) for tenant, key in good if tenant not in failing), 1
        )
        assert {dead_letter.headers["x-dead-message-id"] for dead_letter in rig.dead_letters} == {
            each for each, (tenant, _) in zip(ids, messages, strict=True) if tenant == "a b"
        }
        for tenant in ("default", "acme", "Zürich-é"):
            rows = await rig.rows(tenant)
            assert {row.tenant_id for row in rows} <= {tenant}
            own_ids = {each for each, (name, _) in zip(ids, messages, strict=True) if (name or "default") == tenant}
            assert {row.message_id for row in rows if row.status != "unparsable"} == own_ids
            runs = {row.agent_run_id for row in rows} - {""}
            if kind == "callable":
                assert runs <= {f"{tenant}'s run"}
            else:
                assert {(await store.app.job(run_id).info()).tenant_id for run_id in runs} <= {tenant}
        assert await rig.rows("a b") == []
        rig.close()

    store.run_example(scenario())


# 21: logs ------------------------------------------------------------------------------------------------


@PROPERTY
@given(
    plans=st.lists(
        st.tuples(
            st.sampled_from(["runs", "retries", "exhausted", "fatal", "denied", "unparsable", "again"]),
            st.none() | WORDS | st.just("00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"),
        ),
        min_size=1,
        max_size=6,
    ),
    policy=st.sampled_from(["ack", "nack", "dlq"]),
    concurrency=st.integers(1, 4),
    max_retries=st.integers(1, 3),
)
def test_property_21_every_stage_is_logged_with_the_trace(
    plans: list[tuple[str, str | None]], policy: str, concurrency: int, max_retries: int
) -> None:
    async def scenario() -> None:
        tried: Counter[int] = Counter()

        def act(context: Mapping[str, Any]) -> str:
            number = context["message"]
            tried[number] += 1
            fate = plans[number][0]
            if fate == "fatal":
                raise Fatal("never")
            if fate == "exhausted" or (fate == "retries" and tried[number] == 1):
                raise RuntimeError("not yet")
            return "run"

        async def guard(request: GuardRequest) -> Decision | None:
            return Deny("no") if request.task == "denied" else None

        guards = GuardRegistry(lambda: 5.0)
        guards(guard)
        rig = MemoryRig(
            Recorder(act),
            gate=GuardRunner(guards, {}, LoopClock(), None),
            ack_policy=policy,
            concurrency=concurrency,
            max_retries=max_retries,
        )
        stages = {
            "runs": ["received", "parsed", "handed_over", "ack"],
            "again": ["received", "parsed", "handed_over", "ack"],
            "retries": ["received", "parsed", "retry", "handed_over", "ack"],
            "exhausted": ["received", "parsed", *["retry"] * max_retries, "failed", "dlq"],
            "fatal": ["received", "parsed", "failed", policy],
            "denied": ["received", "parsed", "denied", "dlq" if policy == "dlq" else "ack"],
            "unparsable": ["received", "unparsable", "dlq"],
        }
        expected: dict[str, tuple[list[str], set[str]]] = {}
        for number, (fate, trace) in enumerate(plans):
            headers = {"x-event-name": fate, "x-dedup-key": str(number)}
            headers |= {} if trace is None else {"traceparent" if "-" in trace else "x-trace-id": trace}
            for _ in range(2 if fate == "again" else 1):
                # With one key, so that the first of two is done before the second.
                message_id = rig.write(b"{" if fate == "unparsable" else number, str(number), headers)
                trace_id = f"queue-{message_id}" if trace is None else "ab" * 16 if "-" in trace else trace
                expected[message_id] = (stages[fate], {trace_id})
        with LogCapture().capture() as log:
            await rig.run(len(expected))
        rig.close()
        for message_id, expected_log in expected.items():
            records = log.records_of(message_id)
            logged = (
                [getattr(each, "stage", "") for each in records],
                {getattr(each, "trace_id", "") for each in records},
            )
            assert logged == expected_log
            assert all(message_id in each.getMessage() for each in records)

    run_example(scenario())


# 22: health ----------------------------------------------------------------------------------------------

ACTIONS: Final = ["pause", "resume", "down", "up", "broken", "repaired", "outage", "over", "message", "stop"]


class OutageRuntime(Recorder):
    """Fails during an outage of its dependency."""

    def __init__(self) -> None:
        super().__init__(self._run)
        self.outage = False

    def _run(self, _: Mapping[str, Any]) -> str:
        if self.outage:
            raise Unavailable("unreachable")
        return "run"


@PROPERTY
@given(actions=st.lists(st.sampled_from(ACTIONS), max_size=12), concurrency=st.integers(1, 4))
@example(actions=["outage", "message", "pause", "over", "resume", "stop"], concurrency=1)
def test_property_22_health_reports_the_actual_state(actions: list[str], concurrency: int) -> None:
    async def scenario() -> None:
        runtime = OutageRuntime()
        rig = MemoryRig(runtime, concurrency=concurrency)
        broken, waiting = False, 0
        running, paused, holding = True, False, False
        receive = rig.adapter._next

        def flaky_receive() -> RawMessage | None:
            if broken:
                raise BrokerUnavailable("the consumer is lost")
            return receive()

        rig.adapter._next = flaky_receive  # type: ignore[method-assign]
        assert (await rig.trigger.health()).status == "stopped"
        await rig.trigger.start()
        for action in actions:
            match action:
                case "pause" | "resume" if running:
                    await getattr(rig.trigger, action)()
                    paused = action == "pause"
                case "down" | "up":
                    rig.broker.down = action == "down"
                case "broken" | "repaired":
                    broken = action == "broken"
                    rig.adapter._wakeup.set()
                case "outage" | "over":
                    runtime.outage = action == "outage"
                case "message":
                    rig.write(1)
                    waiting += 1
                case "stop":
                    await rig.trigger.stop()
                    running = False
            # Long enough for the consumer to reconnect and for held messages to be retried.
            await asyncio.sleep(180)
            health = await rig.trigger.health()
            assert health.running == running
            assert health.paused == paused
            assert health.active_workers == (concurrency if running else 0)
            assert health.adapter_healthy == (running and not rig.broker.down)
            delivered = not rig.broker.down and not broken
            if running and not paused:
                if not runtime.outage:
                    holding = False
                    waiting = 0 if delivered else waiting
                elif waiting and delivered:
                    holding = True
            if not running:
                status = "stopped"
            elif rig.broker.down or broken:
                status = "unhealthy"
            else:
                status = "holding" if holding else "paused" if paused else "healthy"
            assert health.status == status
            assert rig.trigger.ready == (running and not broken and not holding)
        await rig.trigger.stop()
        assert rig.trigger.state is TriggerState.STOPPED
        rig.close()

    run_example(scenario())


# 23: secrets ---------------------------------------------------------------------------------------------

#: Long enough not to occur in a text by chance.
SECRETS: Final = st.text(string.ascii_letters + string.digits + "-_.~!$+/=:@% &", min_size=8, max_size=16).map(
    lambda text: f"Zq{text}9x"
)


@pytest.fixture(scope="module")
def echo_port() -> Iterator[int]:
    with echo_server() as port:
        yield port


@PROPERTY
@given(data=st.data(), answers=st.booleans())
@pytest.mark.parametrize("broker", BROKER_TYPES)
def test_property_23_no_secret_in_any_log_of_a_client(
    broker: str, echo_port: int, data: st.DataObject, answers: bool
) -> None:
    """For every broker, with a secret in every field; the server is unreachable or echoes requests."""
    names = [name for name in secret_fields(broker) if broker != "rabbitmq" or name != "url"]
    if broker == "rabbitmq" and data.draw(st.booleans(), "by url"):
        names = ["url"]
    given_secrets = {name: data.draw(SECRETS, name) for name in names}
    fields = make_connection(broker, given_secrets, echo_port if answers else 1)
    texts: list[str] = []

    async def attempt(work: Awaitable[None]) -> None:
        try:
            await work
        except BrokerUnavailable as exc:
            texts.extend(error_texts(exc))

    async def scenario() -> None:
        config = QueueTriggerConfig(queue_name="orders", consumer_group="workers", enable_dedup=False)
        adapter, publisher = build_adapter(broker, fields, "orders", "workers"), build_publisher(broker, fields)
        trigger = QueueTrigger(config, adapter, Recorder())
        await attempt(trigger.start())
        texts.append(str(await trigger.health()))
        await attempt(publisher.connect())
        texts.extend(map(repr, (adapter, publisher, trigger, trigger.config)))
        await trigger.stop()
        await publisher.close()

    with LogCapture().capture("") as log:
        asyncio.run(scenario())
    connection = connection_model(broker).model_validate(fields)
    texts.extend([repr(connection), str(connection), connection.model_dump_json()])
    secret = data.draw(SECRETS, "in an invalid field")
    wrong = data.draw(st.sampled_from(list(invalid_connections(broker, fields, secret))), "mistake")
    for build in (connection_model(broker).model_validate, partial(build_publisher, broker), partial(entry, broker)):
        with pytest.raises((ValueError, InvalidOption)) as raised:
            build(wrong)
        texts.extend(error_texts(raised.value))
    assert_no_secrets([*logged_texts(log), *texts], [*given_secrets.values(), secret])


def entry(broker: str, connection: dict[str, Any]) -> TriggerEntry:
    fields = {"queue_name": "orders", "consumer_group": "workers", "runtime": {"task": "t"}}
    return TriggerEntry.model_validate({**fields, "adapter": {"type": broker, "connection": connection}})


@PROPERTY
@given(
    secret=SECRETS,
    answer=st.sampled_from([200, 400, 503, "no", "quotes"]),
    notation=st.sampled_from(["amqp://app:{}@host/", "password={}", "Authorization: Bearer {}", '{{"api_key": "{}"}}']),
    parser=st.sampled_from(["json", "text", "binary"]),
    broken=st.booleans(),
)
def test_property_23_no_secret_in_any_log_of_a_message(
    secret: str, answer: int | str, notation: str, parser: str, broken: bool
) -> None:
    """Secrets in the body and headers of a message, as the token of a runtime, and in its errors."""
    quoted = notation.format(quote(secret, safe=""))

    def respond(request: httpx.Request) -> httpx.Response:
        if answer == "no":
            raise httpx.ConnectError(f"cannot connect: {quoted}", request=request)
        return httpx.Response(500, text=quoted) if answer == "quotes" else httpx.Response(int(answer), text=secret)

    async def raise_quoted(*_: object) -> str:
        raise RuntimeError(f"it failed: {quoted}")

    async def scenario() -> None:
        over_http = HttpRuntime(
            f"https://agents.local/events?token={quote(secret, safe='')}",
            token=quote(secret, safe=""),
            transport=httpx.MockTransport(respond),
        )
        for runtime in (over_http, CallableRuntime(raise_quoted)):
            rig = MemoryRig(runtime, parser_type=parser, max_retries=1, focus="x")
            texts.append(repr(runtime))
            body = json.dumps({"password": secret}).encode()[: -1 if broken else None]
            rig.write(body, headers={"authorization": f"Bearer {secret}", "x-api-key": secret})
            await rig.run(1)
            texts.extend(str(row) for row in rig.rows)
            texts.extend(
                dead_letter.headers["x-dead-reason"] + dead_letter.headers["x-dead-history"]
                for dead_letter in rig.dead_letters
            )
            rig.close()
        await over_http.close()

    texts: list[str] = []
    with LogCapture().capture("") as log:
        run_example(scenario())
    assert_no_secrets([*logged_texts(log), *texts], [secret])


# 24: stopping --------------------------------------------------------------------------------------------


@PROPERTY
@given(
    plans=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20_000), st.sampled_from(["", "a", "b"])), max_size=12),
    outage_ms=st.tuples(st.integers(0, 60_000), st.integers(0, 20_000)),
    stop_at_ms=st.integers(0, 100_000),
    timeout_s=st.sampled_from([0.0, 1.0, 10.0, 100.0]),
    concurrency=st.integers(1, 5),
)
def test_property_24_stop_waits_releases_and_loses_nothing(
    plans: list[tuple[int, int, str]],
    outage_ms: tuple[int, int],
    stop_at_ms: int,
    timeout_s: float,
    concurrency: int,
) -> None:
    """Stopped at any time during runs, retries and outages; another trigger then handles the rest."""

    async def scenario() -> None:
        loop, dedup = asyncio.get_running_loop(), InMemoryIdempotencyStore(LoopClock())
        running: dict[int, float] = {}
        tried: Counter[int] = Counter()
        finished: Counter[int] = Counter()
        cancelled: set[int] = set()

        async def act(context: Mapping[str, Any]) -> str:
            number = context["message"]
            failures, takes_ms, _ = plans[number]
            if outage_ms[0] <= loop.time() * 1000 < sum(outage_ms):
                raise Unavailable("unreachable")
            tried[number] += 1
            running[number] = loop.time() + takes_ms / 1000
            try:
                await asyncio.sleep(takes_ms / 1000)
            except asyncio.CancelledError:
                cancelled.add(number)
                raise
            finally:
                del running[number]
            if tried[number] <= failures:
                raise RuntimeError("not yet")
            finished[number] += 1
            return f"run-{number}"

        rig = MemoryRig(Recorder(act), dedup=dedup, concurrency=concurrency, max_retries=5)
        ids = [rig.write(number, key) for number, (_, _, key) in enumerate(plans)]
        await rig.trigger.start()
        await asyncio.sleep(stop_at_ms / 1000)
        stopped_at, last, waited_for = loop.time(), max(running.values(), default=0.0), set(running)
        await rig.trigger.stop(timeout_s)
        # It waits for running messages only.
        assert loop.time() == pytest.approx(max(stopped_at, min(last, stopped_at + timeout_s)), abs=1e-3)
        assert not running
        if last < stopped_at + timeout_s:
            assert not cancelled
            for number in waited_for:
                assert rig.settle_actions(ids[number]) == ["ack"] or tried[number] <= plans[number][0]
        # No task is left, and unfinished messages are back at the broker.
        assert rig.trigger.state is TriggerState.STOPPED
        await wait_idle()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        settled = {message_id for _, message_id in rig.adapter.settle_calls}
        assert settled == {ids[number] for number in finished}
        assert await rig.adapter.lag() == len(plans) - len(settled)
        assert {row.message_id for row in rig.rows} == settled
        other = MemoryRig(Recorder(act), dedup=dedup, concurrency=concurrency, max_retries=5, broker=rig.name)
        await other.run(len(plans) - len(settled))
        assert await other.adapter.lag() == 0
        assert finished == dict.fromkeys(range(len(plans)), 1)
        assert sorted(message_id for _, message_id in rig.adapter.settle_calls + other.adapter.settle_calls) == sorted(
            ids
        )
        assert not rig.dead_letters
        rig.close()

    run_example(scenario())
