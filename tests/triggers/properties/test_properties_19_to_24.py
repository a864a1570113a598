"""What can be seen of a trigger from outside, and what must not be (requirement T6, 19 to 24)."""

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
from holdfast.triggers.config import TriggerConfig, TriggerEntry
from holdfast.triggers.dedup import InMemoryDedupStore
from holdfast.triggers.http_runtime import HttpRuntime
from holdfast.triggers.runtime import CallableRuntime
from holdfast.triggers.state import TriggerState
from holdfast.triggers.trigger import QueueTrigger
from tests.triggers.properties.leaks import (
    assert_silent,
    connection_of,
    echo_server,
    mistakes,
    said,
    secret_fields,
    told_by,
)
from tests.triggers.properties.memory_rig import PROPERTY, LoopClock, World, play, rest
from tests.triggers.properties.store_rig import KINDS, Bench, Kind, Listener, Store, open_store, scraped
from tests.triggers.rig import Recorder

pytestmark = pytest.mark.search

WORDS: Final = st.text(string.ascii_letters, min_size=1, max_size=12)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(tmp_path_factory.mktemp("store")) as store:
        yield store


# 19: metrics ---------------------------------------------------------------------------------------------


def histogram(name: str, seconds: Sequence[float]) -> dict[str, Any]:
    """As Prometheus has it."""
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
    """As Prometheus reads them: each message waits before it is received, and takes its time to run."""

    async def story() -> None:
        clock, begun, ended = LoopClock(), dict[str, int](), dict[str, int]()
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

        world = World(Recorder(act), concurrency=concurrency, prefetch=100, max_retries=max_retries)
        watch_ends(world, begun, ended)
        written: list[int] = []
        expected: Counter[str] = Counter(dict.fromkeys(("success", "duplicate", "rejected", "unparsable", "failed"), 0))
        for number, (fate, apart_ms, _) in enumerate(plans):
            for copy in range(2 if fate == "again" else 1):
                world.write(b"{" if fate == "unparsable" else number, headers={"x-dedup-key": str(number)})
                written.append(clock.now_ms())
                expected[_status(fate, copy)] += 1
            await asyncio.sleep(apart_ms / 1000)
        received = clock.now_ms()
        await world.trigger.start()
        await world.off(len(written))
        seen = scraped(world.counts)
        assert {name: value for name, value in seen.items() if "queue_consumer_lag" not in name} == {
            **histogram("queue_consume_delay_seconds", [received / 1000 - each / 1000 for each in written]),
            **histogram(
                "queue_processing_duration_seconds", [ended[each] / 1000 - begun[each] / 1000 for each in ended]
            ),
            **{
                f'queue_messages_consumed_total{{queue="orders",status="{status}"}}': number
                for status, number in expected.items()
            },
            'queue_runtime_calls_total{queue="orders"}': calls,
            'queue_dedup_hits_total{queue="orders"}': expected["duplicate"],
            'queue_active_workers{queue="orders"}': concurrency,
        }
        await world.trigger.stop()
        assert scraped(world.counts)['queue_active_workers{queue="orders"}'] == 0
        world.close()

    play(story())


def watch_ends(world: World, begun: dict[str, int], ended: dict[str, int]) -> None:
    """When each message is first looked at, and when the broker is told of its end, by the world's clock."""
    adapter = world.adapter
    owns, ack, send_to_dlq = adapter.owns, adapter.ack, adapter.send_to_dlq

    def first_look(message: RawMessage) -> bool:
        begun.setdefault(message.message_id, world.clock.now_ms())
        return owns(message)

    async def acked(message: RawMessage) -> None:
        ended[message.message_id] = world.clock.now_ms()
        await ack(message)

    async def buried(message: RawMessage, reason: str, history: Sequence[str] = ()) -> None:
        ended[message.message_id] = world.clock.now_ms()
        await send_to_dlq(message, reason, history)

    adapter.owns, adapter.ack, adapter.send_to_dlq = first_look, acked, buried  # type: ignore[method-assign]


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
def test_property_20_tenants_stay_apart(
    store: Store, kind: Kind, messages: list[tuple[str | None, str]], poisoned: set[str], concurrency: int
) -> None:
    """The same keys, each tenant's own; one tenant's failures are its own; a name that cannot be is nobody's."""

    async def act(_: str, context: Mapping[str, Any], __: str | None, tenant_id: str) -> str:
        if tenant_id in poisoned:
            raise Fatal("this tenant's fault")
        store.ran.append((tenant_id, context["message"]))
        return f"{tenant_id}'s run"

    async def story() -> None:
        bench = Bench(store, kind, act, concurrency=concurrency)
        store.ran.clear()
        async with bench.trigger:
            ids = [
                bench.write(
                    [tenant or "default", key],
                    {"x-dedup-key": key} | ({} if tenant is None else {"x-tenant-id": tenant}),
                )
                for tenant, key in messages
            ]
            await bench.off(len(messages))
        await store.finish_jobs()
        failing = poisoned if kind == "callable" else set()
        good = {(tenant or "default", key) for tenant, key in messages if tenant != "a b"}
        # Once for each tenant and key, for that tenant.
        assert Counter((tenant, *message) for tenant, message in store.ran) == dict.fromkeys(
            ((tenant, tenant, key) for tenant, key in good if tenant not in failing), 1
        )
        assert {letter.headers["x-dead-message-id"] for letter in bench.dead} == {
            each for each, (tenant, _) in zip(ids, messages, strict=True) if tenant == "a b"
        }
        for tenant in ("default", "acme", "Zürich-é"):
            rows = await bench.rows(tenant)
            assert {row.tenant_id for row in rows} <= {tenant}
            own = {each for each, (name, _) in zip(ids, messages, strict=True) if (name or "default") == tenant}
            assert {row.message_id for row in rows if row.status != "unparsable"} == own
            runs = {row.agent_run_id for row in rows} - {""}
            if kind == "callable":
                assert runs <= {f"{tenant}'s run"}
            else:
                assert {(await store.app.job(run_id).info()).tenant_id for run_id in runs} <= {tenant}
        assert await bench.rows("a b") == []
        bench.close()

    store.play(story())


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
    async def story() -> None:
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
        world = World(
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
            "denied": ["received", "parsed", "denied", policy],
            "unparsable": ["received", "unparsable", "dlq"],
        }
        wanted: dict[str, tuple[list[str], set[str]]] = {}
        for number, (fate, trace) in enumerate(plans):
            headers = {"x-event-name": fate, "x-dedup-key": str(number)}
            headers |= {} if trace is None else {"traceparent" if "-" in trace else "x-trace-id": trace}
            for _ in range(2 if fate == "again" else 1):
                # In line, so that the second of two finds the first one done.
                message_id = world.write(b"{" if fate == "unparsable" else number, str(number), headers)
                trace_id = f"queue-{message_id}" if trace is None else "ab" * 16 if "-" in trace else trace
                wanted[message_id] = (stages[fate], {trace_id})
        with Listener().listening() as log:
            await world.run(len(wanted))
        world.close()
        for message_id, expected in wanted.items():
            lines = log.of(message_id)
            told = [getattr(line, "stage", "") for line in lines], {getattr(line, "trace_id", "") for line in lines}
            assert told == expected
            assert all(message_id in line.getMessage() for line in lines)

    play(story())


# 22: health ----------------------------------------------------------------------------------------------

DEEDS: Final = ["pause", "resume", "down", "up", "broken", "mended", "outage", "over", "message", "stop"]


class Failing(Recorder):
    """Takes nothing while something behind it is down."""

    def __init__(self) -> None:
        super().__init__(self._take)
        self.outage = False

    def _take(self, _: Mapping[str, Any]) -> str:
        if self.outage:
            raise Unavailable("away")
        return "run"


@PROPERTY
@given(deeds=st.lists(st.sampled_from(DEEDS), max_size=12), concurrency=st.integers(1, 4))
@example(deeds=["outage", "message", "pause", "over", "resume", "stop"], concurrency=1)
def test_property_22_health_tells_the_truth(deeds: list[str], concurrency: int) -> None:
    async def story() -> None:
        runtime = Failing()
        world = World(runtime, concurrency=concurrency)
        broken, waiting = False, 0
        running, paused, holding = True, False, False
        take = world.adapter._next

        def taken() -> RawMessage | None:
            if broken:
                raise BrokerUnavailable("the consumer is lost")
            return take()

        world.adapter._next = taken  # type: ignore[method-assign]
        assert (await world.trigger.health()).status == "stopped"
        await world.trigger.start()
        for deed in deeds:
            match deed:
                case "pause" | "resume" if running:
                    await getattr(world.trigger, deed)()
                    paused = deed == "pause"
                case "down" | "up":
                    world.broker.down = deed == "down"
                case "broken" | "mended":
                    broken = deed == "broken"
                    world.adapter._wakeup.set()
                case "outage" | "over":
                    runtime.outage = deed == "outage"
                case "message":
                    world.write(1)
                    waiting += 1
                case "stop":
                    await world.trigger.stop()
                    running = False
            # Long enough for the consumer to come back, and for what is held to be tried again.
            await asyncio.sleep(180)
            health = await world.trigger.health()
            assert health.running == running
            assert health.paused == paused
            assert health.active_workers == (concurrency if running else 0)
            assert health.adapter_healthy == (running and not world.broker.down)
            delivered = not world.broker.down and not broken
            if running and not paused:
                if not runtime.outage:
                    holding = False
                    waiting = 0 if delivered else waiting
                elif waiting and delivered:
                    holding = True
            if not running:
                status = "stopped"
            elif world.broker.down or broken:
                status = "unhealthy"
            else:
                status = "holding" if holding else "paused" if paused else "healthy"
            assert health.status == status
            assert world.trigger.ready == (running and not broken and not holding)
        await world.trigger.stop()
        assert world.trigger.state is TriggerState.STOPPED
        world.close()

    play(story())


# 23: secrets ---------------------------------------------------------------------------------------------

#: Long enough to be in no text by chance.
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
    """Of every broker, with a secret in every field that can hold one; nobody answers, or somebody repeats it all."""
    names = [name for name in secret_fields(broker) if broker != "rabbitmq" or name != "url"]
    if broker == "rabbitmq" and data.draw(st.booleans(), "by url"):
        names = ["url"]
    given_secrets = {name: data.draw(SECRETS, name) for name in names}
    fields = connection_of(broker, given_secrets, echo_port if answers else 1)
    texts: list[str] = []

    async def attempt(work: Awaitable[None]) -> None:
        try:
            await work
        except BrokerUnavailable as exc:
            texts.extend(told_by(exc))

    async def story() -> None:
        config = TriggerConfig(queue_name="orders", consumer_group="workers", enable_dedup=False)
        adapter, publisher = build_adapter(broker, fields, "orders", "workers"), build_publisher(broker, fields)
        trigger = QueueTrigger(config, adapter, Recorder())
        await attempt(trigger.start())
        texts.append(str(await trigger.health()))
        await attempt(publisher.connect())
        texts.extend(map(repr, (adapter, publisher, trigger, trigger.config)))
        await trigger.stop()
        await publisher.close()

    with Listener().listening("") as log:
        asyncio.run(story())
    connection = connection_model(broker).model_validate(fields)
    texts.extend([repr(connection), str(connection), connection.model_dump_json()])
    secret = data.draw(SECRETS, "in a wrong place")
    wrong = data.draw(st.sampled_from(list(mistakes(broker, fields, secret))), "mistake")
    for build in (connection_model(broker).model_validate, partial(build_publisher, broker), partial(entry, broker)):
        with pytest.raises((ValueError, InvalidOption)) as raised:
            build(wrong)
        texts.extend(told_by(raised.value))
    assert_silent([*said(log), *texts], [*given_secrets.values(), secret])


def entry(broker: str, connection: dict[str, Any]) -> TriggerEntry:
    told = {"queue_name": "orders", "consumer_group": "workers", "runtime": {"task": "t"}}
    return TriggerEntry.model_validate({**told, "adapter": {"type": broker, "connection": connection}})


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
    """In a message's body and headers, as a runtime's token, in what a runtime says of its failure."""
    quoted = notation.format(quote(secret, safe=""))

    def respond(request: httpx.Request) -> httpx.Response:
        if answer == "no":
            raise httpx.ConnectError(f"cannot connect: {quoted}", request=request)
        return httpx.Response(500, text=quoted) if answer == "quotes" else httpx.Response(int(answer), text=secret)

    async def quoting(*_: object) -> str:
        raise RuntimeError(f"it failed: {quoted}")

    async def story() -> None:
        over_http = HttpRuntime(
            f"https://agents.local/events?token={quote(secret, safe='')}",
            token=quote(secret, safe=""),
            transport=httpx.MockTransport(respond),
        )
        for runtime in (over_http, CallableRuntime(quoting)):
            world = World(runtime, parser_type=parser, max_retries=1, focus="x")
            texts.append(repr(runtime))
            body = json.dumps({"password": secret}).encode()[: -1 if broken else None]
            world.write(body, headers={"authorization": f"Bearer {secret}", "x-api-key": secret})
            await world.run(1)
            texts.extend(str(row) for row in world.rows)
            texts.extend(letter.headers["x-dead-reason"] + letter.headers["x-dead-history"] for letter in world.dead)
            world.close()
        await over_http.close()

    texts: list[str] = []
    with Listener().listening("") as log:
        play(story())
    assert_silent([*said(log), *texts], [secret])


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
    """Stopped at any moment, in the middle of runs, retries and outages; another trigger then does the rest."""

    async def story() -> None:
        loop, dedup = asyncio.get_running_loop(), InMemoryDedupStore(LoopClock())
        running: dict[int, float] = {}
        tried: Counter[int] = Counter()
        finished: Counter[int] = Counter()
        cut: set[int] = set()

        async def act(context: Mapping[str, Any]) -> str:
            number = context["message"]
            failures, takes_ms, _ = plans[number]
            if outage_ms[0] <= loop.time() * 1000 < sum(outage_ms):
                raise Unavailable("away")
            tried[number] += 1
            running[number] = loop.time() + takes_ms / 1000
            try:
                await asyncio.sleep(takes_ms / 1000)
            except asyncio.CancelledError:
                cut.add(number)
                raise
            finally:
                del running[number]
            if tried[number] <= failures:
                raise RuntimeError("not yet")
            finished[number] += 1
            return f"run-{number}"

        world = World(Recorder(act), dedup=dedup, concurrency=concurrency, max_retries=5)
        ids = [world.write(number, key) for number, (_, _, key) in enumerate(plans)]
        await world.trigger.start()
        await asyncio.sleep(stop_at_ms / 1000)
        began, last, waited_for = loop.time(), max(running.values(), default=0.0), set(running)
        await world.trigger.stop(timeout_s)
        # It waits for what runs and for nothing else.
        assert loop.time() == pytest.approx(max(began, min(last, began + timeout_s)), abs=1e-3)
        assert not running
        if last < began + timeout_s:
            assert not cut
            for number in waited_for:
                assert world.words(ids[number]) == ["ack"] or tried[number] <= plans[number][0]
        # Nothing is left behind, and the rest is the broker's again.
        assert world.trigger.state is TriggerState.STOPPED
        await rest()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        off = {message_id for _, message_id in world.adapter.told}
        assert off == {ids[number] for number in finished}
        assert await world.adapter.lag() == len(plans) - len(off)
        assert {row.message_id for row in world.rows} == off
        other = World(Recorder(act), dedup=dedup, concurrency=concurrency, max_retries=5, broker=world.name)
        await other.run(len(plans) - len(off))
        assert await other.adapter.lag() == 0
        assert finished == dict.fromkeys(range(len(plans)), 1)
        assert sorted(message_id for _, message_id in world.adapter.told + other.adapter.told) == sorted(ids)
        assert not world.dead
        world.close()

    play(story())
