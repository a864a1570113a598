"""Properties 1 to 6 of triggers (requirement T6): adapters, envelopes, parsers, configuration, lifecycle."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from datetime import datetime
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import msgspec
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast import Fatal, Unavailable
from holdfast.brokers.factory import BROKER_TYPES, build_adapter, build_publisher
from holdfast.brokers.memory import MemoryBroker, MemoryConfig, MockQueueAdapter
from holdfast.brokers.port import OutgoingMessage, Publisher, QueueAdapter, RawMessage
from holdfast.errors import UsageError
from holdfast.ledger.port.messages import ExecutionStatus
from holdfast.triggers.config import QueueTriggerConfig
from holdfast.triggers.config_file import load_text
from holdfast.triggers.dedup import InMemoryIdempotencyStore
from holdfast.triggers.envelope import HeaderNames, MessageEnvelope, parser_of
from holdfast.triggers.runtime import Runtime
from holdfast.triggers.state import TriggerState
from holdfast.triggers.trigger import QueueTrigger
from tests.triggers.properties.memory_rig import PROPERTY, START, MemoryRig, Script, run_example, until, wait_idle
from tests.triggers.properties.strategies import (
    DEDUP_KEYS,
    EVENTS,
    HEADER_NAMES,
    HEADERS,
    JSON,
    TENANTS,
    TEXTS,
    is_same,
    json_bodies,
)
from tests.triggers.rig import MemoryTriggerStore
from tests.triggers.rig import until as until_real

pytestmark = pytest.mark.search

POLICIES: Final = st.sampled_from(["ack", "nack", "requeue", "dlq"])

# 1: every adapter offers the same interface and can be swapped -------------------------------------------

_QUEUES: Final = st.text("abcdefghij0123", min_size=1, max_size=20).map(lambda name: "q" + name)
_CONNECTIONS: Final[Mapping[str, dict[str, Any]]] = {"kafka": {"bootstrap_servers": "127.0.0.1:1"}}


def _members(port: type) -> dict[str, Any]:
    return {name: member for name, member in vars(port).items() if callable(member) and not name.startswith("_")}


def _shape(function: Any) -> list[tuple[str, Any, Any]]:
    """Return the signature of a function."""
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


def _check_implements(client: object, port: type) -> None:
    for name, expected in _members(port).items():
        actual = inspect.getattr_static(type(client), name)
        assert actual is not expected, f"{type(client).__name__} lacks {name}"
        assert _shape(actual) == _shape(expected), f"{type(client).__name__}.{name}"
        if name == "consume":
            assert inspect.isasyncgenfunction(actual) or not inspect.iscoroutinefunction(actual)
        else:
            assert inspect.iscoroutinefunction(actual) == inspect.iscoroutinefunction(expected), name


@pytest.mark.parametrize("broker_type", BROKER_TYPES)
@PROPERTY
@given(
    queue=_QUEUES, group=_QUEUES, prefetch=st.integers(1, 500), dead=st.none() | _QUEUES.map(lambda it: it + ".dead")
)
def test_property_01_every_adapter_offers_the_same_interface(
    broker_type: str, queue: str, group: str, prefetch: int, dead: str | None
) -> None:
    async def scenario() -> None:
        connection = _CONNECTIONS.get(broker_type, {})
        adapter = build_adapter(broker_type, connection, queue, group, prefetch, dlq_name=dead)
        publisher = build_publisher(broker_type, connection)
        _check_implements(adapter, QueueAdapter)
        _check_implements(publisher, Publisher)
        # An undelivered message is not owned. `close` needs no connection and can be repeated.
        assert not adapter.owns(RawMessage("1", b"", {}, START, {}))
        for client in (adapter, publisher, adapter, publisher):
            await client.close()

    asyncio.run(scenario())


class _Message(NamedTuple):
    key: str
    fate: str


class _Actor(Runtime):
    """Handles each message as its payload requests."""

    def __init__(self) -> None:
        self.tries: dict[int, int] = {}
        self.events: dict[str, list[tuple[str, int]]] = {}

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        number, fate = context["message"]["n"], context["message"]["fate"]
        tried = self.tries[number] = self.tries.get(number, 0) + 1
        if fate == "never" or (fate == "later" and tried == 1):
            raise RuntimeError("not yet")
        if fate == "wrong" and tried == 1:
            raise Fatal("wrong")
        self.events.setdefault(context["headers"].get("order-key", ""), []).append((event_name, number))
        return f"run-{number}"


async def _observe(broker_type: str, connection: dict[str, Any], sent: list[_Message], policy: str) -> dict[str, Any]:
    """Run the same scenario on any broker, through the ports only."""
    queue = f"property-{secrets.token_hex(6)}"
    publisher, runtime, book = build_publisher(broker_type, connection), _Actor(), MemoryTriggerStore()
    config = QueueTriggerConfig(queue_name=queue, consumer_group="g", ack_policy=policy, max_retries=1, concurrency=2)
    adapter = build_adapter(broker_type, connection, queue, "g", config.prefetch)
    trigger = QueueTrigger(
        config, adapter, runtime, book=book, dedup=InMemoryIdempotencyStore(), sleep=lambda _: asyncio.sleep(0)
    )
    await publisher.connect()
    answers = await publisher.publish(
        [
            OutgoingMessage(
                queue,
                b"{" if one.fate == "unreadable" else json.dumps({"n": number, "fate": one.fate}).encode(),
                {"X-Event-Name": one.fate, "order-key": one.key, "number": str(number)},
                one.key,
            )
            for number, one in enumerate(sent)
        ]
    )
    assert answers == [None] * len(sent)
    requeued = sum(one.fate == "wrong" for one in sent) if policy == "requeue" else 0
    await trigger.start()
    await until_real(lambda: sum(trigger.counts.consumed.values()) >= len(sent) + requeued)
    health, lag = await trigger.health(), await adapter.lag()
    await trigger.stop()
    dead_letters = await _read_dead_letters(broker_type, connection, f"{queue}.dlq", trigger.counts.dead_letters)
    await publisher.close()
    # The order between keys and of messages without a key is undefined.
    ran = {key: events if key else sorted(events) for key, events in runtime.events.items()}
    return {
        "ran": ran,
        "tries": runtime.tries,
        "dead_letters": dead_letters,
        "rows": sorted((row.status, row.event_name, row.retry_count, row.error_message) for row in book.rows.values()),
        "health": health,
        "lag": lag,
    }


async def _read_dead_letters(broker_type: str, connection: dict[str, Any], queue: str, count: int) -> list[Any]:
    if not count:
        return []
    adapter = build_adapter(broker_type, connection, queue, "reader")
    await adapter.connect()
    decoded: list[Any] = []
    try:
        async with asyncio.timeout(10), aclosing(_generator(adapter)) as messages:
            while len(decoded) < count:
                dead_letter = await anext(messages)
                await adapter.ack(dead_letter)
                headers = dict(dead_letter.headers)
                del headers["x-dead-message-id"], headers["x-dead-source"]
                tries = [line.partition(" at ")[0] for line in json.loads(headers.pop("x-dead-history"))]
                decoded.append((dead_letter.body, headers, dead_letter.key, tries))
    finally:
        await adapter.close()
    return sorted(decoded, key=lambda dead_letter: dead_letter[1]["number"])


async def _generator(adapter: QueueAdapter) -> AsyncGenerator[RawMessage, None]:
    async for message in adapter.consume():
        yield message


_FATES: Final = ("good", "later", "never", "wrong", "unreadable")


@pytest.mark.redis
@PROPERTY
@given(
    sent=st.lists(
        st.builds(_Message, st.sampled_from(["", "a", "b"]), st.sampled_from(_FATES)), min_size=1, max_size=6
    ),
    policy=POLICIES,
)
def test_property_01_an_adapter_can_be_swapped_for_another(redis_url: str, sent: list[_Message], policy: str) -> None:
    async def scenario() -> None:
        in_memory = await _observe("memory", {"name": "swap"}, sent, policy)
        on_redis = await _observe("redis", {"url": redis_url}, sent, policy)
        MemoryBroker.reset("swap")
        assert in_memory == on_redis
        # Equality alone would also hold if nothing had happened.
        assert in_memory["lag"] == 0
        assert in_memory["health"].status == "healthy"
        ran = {number for events in in_memory["ran"].values() for _, number in events}
        assert ran == {
            number
            for number, one in enumerate(sent)
            if one.fate in ("good", "later") or (one.fate == "wrong" and policy == "requeue")
        }
        for key, events in in_memory["ran"].items():
            numbers = [number for _, number in events]
            assert not key or policy == "requeue" or numbers == sorted(numbers)

    asyncio.run(scenario())


# 2: an envelope has all fields, mapped correctly ---------------------------------------------------------


def _in_any_case(name: str, upper: list[bool]) -> str:
    return "".join(char.upper() if up else char for char, up in zip(name, upper, strict=False)) + name[len(upper) :]


@PROPERTY
@given(
    value=JSON,
    headers=HEADERS,
    event=st.none() | EVENTS,
    dedup=st.none() | DEDUP_KEYS,
    tenant=st.none() | TENANTS,
    names=st.lists(HEADER_NAMES.map(lambda name: "h-" + name), min_size=3, max_size=3, unique=True),
    usual=st.booleans(),
    upper=st.lists(st.booleans(), max_size=8),
    age_s=st.integers(0, 100_000),
)
def test_property_02_an_envelope_has_all_fields_mapped_correctly(
    value: Any,
    headers: dict[str, str],
    event: str | None,
    dedup: str | None,
    tenant: str | None,
    names: list[str],
    usual: bool,
    upper: list[bool],
    age_s: int,
) -> None:
    names = ["x-event-name", "x-dedup-key", "x-tenant-id"] if usual else names
    known = {name: it for name, it in zip(names, (event, dedup, tenant), strict=True) if it is not None}

    async def scenario() -> None:
        config: dict[str, Any] = (
            {} if usual else dict(zip(("event_name_header", "dedup_header", "tenant_header"), names, strict=True))
        )
        runtime = _AnyPayload()
        config = {name: _in_any_case(header, upper) for name, header in config.items()}
        rig = MemoryRig(runtime, **config)
        raws = _record_received(rig)
        sent = headers | known
        message_id = rig.write(value, headers={_in_any_case(name, upper): text for name, text in sent.items()})
        await asyncio.sleep(age_s)
        await rig.run(1)
        rig.close()
        (call,) = runtime.calls
        context = call.context
        assert is_same(context["message"], value)
        assert context["headers"] == sent
        assert (context["message_id"], context["source"]) == (message_id, "orders")
        assert datetime.fromisoformat(context["received_at"]) == START
        assert call.event_name == (event or "queue_message")
        assert call.tenant_id == (tenant or "default")
        assert call.key == f"orders:workers:{dedup or message_id}"
        # Missing headers are None in the envelope.
        (raw,) = raws
        envelope = MessageEnvelope.from_raw(raw, "orders", parser_of("json"), HeaderNames(*names))
        assert (envelope.event_name, envelope.dedup_key, envelope.tenant_id) == (event, dedup, tenant)
        assert is_same(envelope.payload, value)
        assert (envelope.message_id, envelope.headers, envelope.source) == (message_id, sent, "orders")
        assert envelope.received_at == START
        assert envelope.context() == context

    run_example(scenario())


class _AnyPayload(Script):
    """Accepts any payload."""

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        return "run"


def _record_received(rig: MemoryRig) -> list[RawMessage]:
    """Return a list that collects the messages that the trigger receives from now on."""
    raws: list[RawMessage] = []
    receive = rig.adapter._next

    def recording() -> RawMessage | None:
        raw = receive()
        if raw is not None:
            raws.append(raw)
        return raw

    rig.adapter._next = recording  # type: ignore[method-assign]
    return raws


# 3: json, text and binary parse without loss -------------------------------------------------------------


def _event_of(written: tuple[Any, bytes]) -> tuple[Any, bytes]:
    value, body = written
    return value, b'{"specversion": "1.0", "id": "1", "source": "/s", "type": "t", "data": %s}' % body


#: The parser, the value, and its encoding.
_WRITTEN: Final = st.one_of(
    json_bodies().map(lambda written: ("json", *written)),
    json_bodies(st.floats(allow_nan=False, allow_infinity=False)).map(lambda written: ("json", *written)),
    json_bodies().map(lambda written: ("cloudevents", *_event_of(written))),
    TEXTS.map(lambda text: ("text", text, text.encode())),
    st.binary(max_size=60).map(lambda body: ("binary", body, body)),
)


@PROPERTY
@given(written=_WRITTEN)
def test_property_03_bodies_are_parsed_without_loss(written: tuple[str, Any, bytes]) -> None:
    parser, value, body = written

    async def scenario() -> None:
        runtime = _AnyPayload()
        rig = MemoryRig(runtime, parser_type=parser)
        rig.write(body)
        await rig.run(1)
        rig.close()
        assert [row.status for row in rig.rows] == [ExecutionStatus.SUCCESS]
        (call,) = runtime.calls
        assert is_same(call.context["message"], value)
        # JSON is passed on unchanged, so that numbers are not rounded.
        if parser in ("json", "cloudevents"):
            assert call.message_json is not None
            assert call.message_json.strip() == body.strip() or parser == "cloudevents"
            assert is_same(json.loads(msgspec.json.encode(call.message())), value)
        elif parser == "text":
            assert call.message() == value

    run_example(scenario())


# 4: unparsable → DLQ with the reason ---------------------------------------------------------------------


class _Bad(NamedTuple):
    parser: str
    body: bytes
    headers: dict[str, str]
    #: Part of the reason.
    reason: str


_OPEN: Final = st.lists(JSON, min_size=1, max_size=3) | st.dictionaries(TEXTS, JSON, min_size=1, max_size=3)
#: Truncated JSON is not valid.
_CUT: Final = st.tuples(_OPEN.map(json.dumps), st.floats(0, 1)).map(
    lambda cut: cut[0][: min(len(cut[0]) - 1, int(len(cut[0]) * cut[1]))].encode()
)
_GARBAGE: Final = st.binary(max_size=20).map(lambda tail: b"\xff" + tail)
_EVENT: Final = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t"}
_CONTROLS: Final = st.sampled_from(["a\x1bb", "a\nb", "x\x7f", "é" * 101, "a\u200bb"])

_BAD: Final = st.one_of(
    (_CUT | _GARBAGE).map(lambda body: _Bad("json", body, {}, "not valid JSON")),
    st.tuples(TEXTS, _GARBAGE).map(lambda text: _Bad("text", text[0].encode() + text[1], {}, "not UTF-8")),
    st.sampled_from(sorted(_EVENT)).map(
        lambda name: _Bad(
            "cloudevents", json.dumps({each: _EVENT[each] for each in _EVENT if each != name}).encode(), {}, repr(name)
        )
    ),
    st.just(_Bad("cloudevents", json.dumps(_EVENT | {"specversion": "0.3"}).encode(), {}, "version")),
    (_CONTROLS | st.just("a b")).map(lambda name: _Bad("binary", b"1", {"x-tenant-id": name}, "x-tenant-id")),
    _CONTROLS.map(lambda name: _Bad("binary", b"1", {"x-event-name": name}, "event name")),
    st.integers(5_001, 5_100).map(lambda size: _Bad("text", b"x" * size, {}, "bytes")),
)
_GOOD: Final = {"json": b"1", "text": b"1", "binary": b"1", "cloudevents": json.dumps(_EVENT).encode()}


@PROPERTY
@given(bad=_BAD, policy=POLICIES, headers=HEADERS, others=st.integers(0, 2), position=st.integers(0, 2))
def test_property_04_an_unparsable_message_is_a_dead_letter_with_the_reason(
    bad: _Bad, policy: str, headers: dict[str, str], others: int, position: int
) -> None:
    async def scenario() -> None:
        runtime = Script()
        rig = MemoryRig(runtime, parser_type=bad.parser, ack_policy=policy, payload_limit=5_000, enable_dedup=False)
        written, bad_id = [], ""
        for number in range(others + 1):
            if number == min(position, others):
                bad_id = rig.write(bad.body, headers=headers | bad.headers)
            else:
                written.append(rig.write(_GOOD[bad.parser]))
        async with rig.trigger:
            await rig.wait_handled(others + 1)
            # Acknowledged: the group has no messages left, neither waiting nor in flight.
            assert (await rig.adapter.lag(), rig.trigger.in_flight) == (0, 0)
            assert not rig.adapter._deliveries
        rig.close()
        (dead_letter,) = rig.dead_letters
        assert dead_letter.body == bad.body
        assert {name: dead_letter.headers[name] for name in headers | bad.headers} == headers | bad.headers
        assert bad.reason in dead_letter.headers["x-dead-reason"]
        assert (dead_letter.headers["x-dead-source"], dead_letter.headers["x-dead-message-id"]) == ("orders", bad_id)
        assert rig.settle_actions(bad_id) == ["dlq"]
        assert len(runtime.calls) == others
        assert not rig.slept
        assert {row.message_id: row.status for row in rig.rows} == {
            bad_id: ExecutionStatus.UNPARSABLE,
            **dict.fromkeys(written, ExecutionStatus.SUCCESS),
        }
        row = next(row for row in rig.rows if row.message_id == bad_id)
        assert row.error_message == dead_letter.headers["x-dead-reason"]

    run_example(scenario())


# 5: configuration takes effect ---------------------------------------------------------------------------


@st.composite
def _configs(draw: st.DrawFn) -> dict[str, Any]:
    concurrency = draw(st.integers(1, 4))
    headers = draw(st.lists(HEADER_NAMES.map(lambda name: "h-" + name), min_size=3, max_size=3, unique=True))
    config = {
        "concurrency": concurrency,
        "prefetch": draw(st.integers(concurrency, 8)),
        "ack_policy": draw(POLICIES),
        "max_retries": draw(st.integers(0, 4)),
        "retry_backoff_base": draw(st.sampled_from([0.25, 0.5, 1, 3])),
        "retry_backoff_multiplier": draw(st.sampled_from([1, 1.5, 2, 3])),
        "enable_dedup": draw(st.booleans()),
        "idempotency_window": draw(st.integers(2, 100)),
        "parser_type": draw(st.sampled_from(["json", "text", "binary"])),
        "event_name_header": headers[0],
        "dedup_header": headers[1],
        "tenant_header": headers[2],
        "focus": draw(_QUEUES),
        "dlq_name": draw(_QUEUES.map(lambda name: name + ".dead")),
        "metrics": {"enabled": draw(st.booleans()), "export_interval": draw(st.integers(5, 60))},
    }
    # Omitted keys have their defaults.
    left_out = draw(st.sets(st.sampled_from(sorted(config)), max_size=5))
    kept = {name: value for name, value in config.items() if name not in left_out}
    return kept | {"queue_name": draw(_QUEUES), "consumer_group": draw(_QUEUES)}


_DEFAULTS: Final[dict[str, Any]] = {
    "concurrency": 1,
    "ack_policy": "ack",
    "max_retries": 3,
    "retry_backoff_base": 1.0,
    "retry_backoff_multiplier": 2.0,
    "enable_dedup": True,
    "idempotency_window": 3600,
    "parser_type": "json",
    "event_name_header": "x-event-name",
    "dedup_header": "x-dedup-key",
    "tenant_header": "x-tenant-id",
    "focus": None,
    "metrics": {"enabled": True, "export_interval": 15},
}
#: Payloads: one that always fails, one that fails permanently at once, one sent with a duplicate key.
_FAILS, _FATAL, _TWIN = 1, 2, 3


@PROPERTY
@given(config=_configs())
def test_property_05_configuration_takes_effect(config: dict[str, Any]) -> None:
    """From the text of the file to the behaviour of the trigger."""
    text = yaml.safe_dump(config | {"adapter": {"type": "memory"}, "runtime": {"callable": "a:b"}})
    (entry,) = load_text(text, environment={})
    concurrency = config.get("concurrency", 1)
    expected = SimpleNamespace(
        **(_DEFAULTS | {"dlq_name": config["queue_name"] + ".dlq", "prefetch": max(10, 2 * concurrency)} | config)
    )

    async def scenario() -> None:
        runtime = _Busy()
        rig = MemoryRig(runtime, full_config=entry)
        lag_reads = _record_lag_reads(rig)
        headers = {expected.event_name_header: "paid", expected.tenant_header: "acme"}
        for number in range(expected.prefetch + 2):
            rig.write(str(100 + number).encode())
        await rig.trigger.start()
        # Concurrency and prefetch are as configured.
        await wait_idle()
        assert runtime.now == expected.concurrency
        assert (rig.trigger.in_flight, rig.counts.active_workers) == (expected.prefetch, expected.concurrency)
        runtime.go.set()
        await rig.wait_handled(expected.prefetch + 2)
        kinds = {"json": int, "text": str, "binary": bytes}
        assert {type(call.context["message"]) for call in runtime.calls} == {kinds[expected.parser_type]}
        # Retries, and the dead-letter queue.
        rig.write(b"%d" % _FAILS, headers=headers)
        await until(lambda: rig.broker.messages(expected.dlq_name), "a dead letter")
        tries = runtime.times[_FAILS]
        assert [later - earlier for earlier, later in itertools.pairwise(tries)] == pytest.approx(
            [expected.retry_backoff_base * expected.retry_backoff_multiplier**n for n in range(expected.max_retries)],
            abs=1e-3,
        )
        assert len(tries) == 1 + expected.max_retries
        call = runtime.calls[-1]
        assert (call.event_name, call.tenant_id, call.focus) == ("paid", "acme", expected.focus)
        assert call.context["source"] == expected.queue_name
        # Permanent failures follow the policy.
        fatal_id = rig.write(b"%d" % _FATAL)
        await until(lambda: rig.settle_actions(fatal_id), "the policy")
        await wait_idle()
        assert rig.settle_actions(fatal_id)[0] == expected.ack_policy
        # A key is kept for its window.
        twins = {expected.dedup_header: "twin"}
        for pause_s, runs in ((0, 1), (expected.idempotency_window - 1, 1), (2, 2)):
            await asyncio.sleep(pause_s)
            before = rig.handled
            rig.write(b"%d" % _TWIN, headers=twins)
            await rig.wait_handled(before + 1)
            if expected.enable_dedup:
                assert len(runtime.times[_TWIN]) == runs
        assert expected.enable_dedup or len(runtime.times[_TWIN]) == 3
        # The lag is read as often as configured.
        elapsed_s = asyncio.get_running_loop().time()
        metrics = expected.metrics
        assert len(lag_reads) == pytest.approx(
            elapsed_s // metrics["export_interval"] + 1 if metrics["enabled"] else 0, abs=1
        )
        assert metrics["enabled"] == bool(lag_reads)
        await rig.trigger.stop()
        # This group has received all messages, another group none.
        assert await _get_lag(rig, expected.queue_name, expected.consumer_group) == 0
        assert await _get_lag(rig, expected.queue_name, "another-group") == expected.prefetch + 7
        rig.close()

    run_example(scenario())


class _Busy(Script):
    """Blocks on the first messages, to show how many are handled concurrently."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.go = asyncio.Event()
        self.times: dict[int, list[float]] = {}

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        number = int(context["message"])
        times = self.times.setdefault(number, [])
        times.append(asyncio.get_running_loop().time())
        self.now += 1
        await self.go.wait()
        self.now -= 1
        if number == _FAILS:
            raise RuntimeError("no")
        if number == _FATAL and len(times) == 1:
            raise Fatal("never")
        return "run"


def _record_lag_reads(rig: MemoryRig) -> list[float]:
    read_at: list[float] = []
    lag = rig.adapter.lag

    async def recording() -> int | None:
        read_at.append(asyncio.get_running_loop().time())
        return await lag()

    rig.adapter.lag = recording  # type: ignore[method-assign]
    return read_at


async def _get_lag(rig: MemoryRig, queue: str, group: str) -> int | None:
    adapter = MockQueueAdapter(MemoryConfig(name=rig.name), queue, group)
    await adapter.connect()
    lag = await adapter.lag()
    await adapter.close()
    return lag


# 6: start, pause, resume and stop change the reported state ---------------------------------------------

_STEPS: Final = st.lists(
    st.sampled_from(["start", "pause", "resume", "stop", "write", "write", "write", "down", "up"]), max_size=14
)


@PROPERTY
@given(steps=_STEPS, concurrency=st.integers(1, 3), early=st.booleans())
@example(steps=["down", "write", "pause", "up", "resume"], concurrency=1, early=True)
def test_property_06_lifecycle_calls_change_the_reported_state(steps: list[str], concurrency: int, early: bool) -> None:
    async def scenario() -> None:
        runtime = _Outage()
        rig = MemoryRig(runtime, concurrency=concurrency)
        life, paused, written = "new", False, 0
        for step in (["start"] if early else []) + steps:
            attempts_before = sum(map(len, runtime.tries.values()))
            match step:
                case "write":
                    rig.write(written)
                    written += 1
                case "down" | "up":
                    runtime.down = step == "down"
                case "stop":
                    await rig.trigger.stop()
                    await rig.trigger.stop()
                    life = "stopped"
                case "start" if life == "new":
                    await rig.trigger.start()
                    life = "running"
                case "pause" | "resume" if life == "running":
                    await (rig.trigger.pause() if step == "pause" else rig.trigger.resume())
                    paused = step == "pause"
                case _:
                    with pytest.raises(UsageError):
                        await getattr(rig.trigger, step)()
            works = life == "running" and not paused
            if works and not runtime.down:
                # Delayed messages run now, those of an outage after the next probe.
                await until(lambda: len(runtime.ran) == written, "the run of all messages")  # noqa: B023
            await (wait_idle() if works else asyncio.sleep(100))
            if not works:
                assert sum(map(len, runtime.tries.values())) == attempts_before, f"run while {life}, paused: {paused}"
            holding = life == "running" and runtime.stuck
            state = "holding" if holding else "paused" if life == "running" and paused else life
            await _check_state(rig, state, paused and life != "new", concurrency)
        await rig.trigger.stop()
        assert rig.trigger.state is TriggerState.STOPPED
        rig.close()
        assert runtime.ran == sorted(set(runtime.ran))

    run_example(scenario())


async def _check_state(rig: MemoryRig, state: str, paused: bool, concurrency: int) -> None:
    trigger = rig.trigger
    health = await trigger.health()
    running = state in ("running", "paused", "holding")
    assert trigger.state == state
    assert trigger.ready == (state in ("running", "paused"))
    assert health.status == ("healthy" if state == "running" else state if running else "stopped")
    assert (health.running, health.adapter_healthy) == (running, running)
    assert health.active_workers == (concurrency if running else 0)
    assert health.paused == paused


class _Outage(Script):
    """`down`: its dependency does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.down = False
        self.tried: set[Any] = set()

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        payload = context["message"]
        self.tries.setdefault(payload, []).append(asyncio.get_running_loop().time())
        self.tried.add(payload)
        if self.down:
            raise Unavailable("it is down")
        self.ran.append(payload)
        return "run"

    @property
    def stuck(self) -> bool:
        """Whether an attempted message has not succeeded."""
        return bool(self.tried - set(self.ran))
