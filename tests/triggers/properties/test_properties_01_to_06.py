"""The first six properties of triggers (requirement T6): adapters, envelopes, parsers, configuration, life."""

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
from holdfast.brokers.memory import MemoryAdapter, MemoryBroker, MemoryConfig
from holdfast.brokers.port import OutgoingMessage, Publisher, QueueAdapter, RawMessage
from holdfast.errors import UsageError
from holdfast.ledger.port.messages import ExecutionStatus
from holdfast.triggers.config import TriggerConfig
from holdfast.triggers.config_file import load_text
from holdfast.triggers.dedup import InMemoryDedupStore
from holdfast.triggers.envelope import HeaderNames, MessageEnvelope, parser_of
from holdfast.triggers.runtime import Runtime
from holdfast.triggers.state import TriggerState
from holdfast.triggers.trigger import QueueTrigger
from tests.triggers.properties.memory_rig import PROPERTY, START, Script, World, play, rest, until
from tests.triggers.properties.strategies import (
    DEDUP_KEYS,
    EVENTS,
    HEADER_NAMES,
    HEADERS,
    JSON,
    TENANTS,
    TEXTS,
    json_bodies,
    same,
)
from tests.triggers.rig import MemoryBook
from tests.triggers.rig import until as until_real

pytestmark = pytest.mark.search

POLICIES: Final = st.sampled_from(["ack", "nack", "requeue", "dlq"])

# 1: every adapter offers the same interface and can be swapped -------------------------------------------

_QUEUES: Final = st.text("abcdefghij0123", min_size=1, max_size=20).map(lambda name: "q" + name)
_CONNECTIONS: Final[Mapping[str, dict[str, Any]]] = {"kafka": {"bootstrap_servers": "127.0.0.1:1"}}


def _members(port: type) -> dict[str, Any]:
    return {name: member for name, member in vars(port).items() if callable(member) and not name.startswith("_")}


def _shape(function: Any) -> list[tuple[str, Any, Any]]:
    """How it is called."""
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


def _offers(client: object, port: type) -> None:
    for name, wanted in _members(port).items():
        given_ = inspect.getattr_static(type(client), name)
        assert given_ is not wanted, f"{type(client).__name__} lacks {name}"
        assert _shape(given_) == _shape(wanted), f"{type(client).__name__}.{name}"
        if name == "consume":
            assert inspect.isasyncgenfunction(given_) or not inspect.iscoroutinefunction(given_)
        else:
            assert inspect.iscoroutinefunction(given_) == inspect.iscoroutinefunction(wanted), name


@pytest.mark.parametrize("broker_type", BROKER_TYPES)
@PROPERTY
@given(
    queue=_QUEUES, group=_QUEUES, prefetch=st.integers(1, 500), dead=st.none() | _QUEUES.map(lambda it: it + ".dead")
)
def test_property_01_every_adapter_offers_the_same_interface(
    broker_type: str, queue: str, group: str, prefetch: int, dead: str | None
) -> None:
    async def story() -> None:
        connection = _CONNECTIONS.get(broker_type, {})
        adapter = build_adapter(broker_type, connection, queue, group, prefetch, dlq_name=dead)
        publisher = build_publisher(broker_type, connection)
        _offers(adapter, QueueAdapter)
        _offers(publisher, Publisher)
        # What nobody has delivered is nobody's; and closing needs no connection, and may be done twice.
        assert not adapter.owns(RawMessage("1", b"", {}, START, {}))
        for client in (adapter, publisher, adapter, publisher):
            await client.close()

    asyncio.run(story())


class _Sent(NamedTuple):
    key: str
    fate: str


class _Actor(Runtime):
    """Does with each message what its payload says."""

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
        self.events.setdefault(context["headers"].get("line", ""), []).append((event_name, number))
        return f"run-{number}"


async def _observe(broker_type: str, connection: dict[str, Any], sent: list[_Sent], policy: str) -> dict[str, Any]:
    """The same story on any broker, told and watched through the ports alone."""
    queue = f"property-{secrets.token_hex(6)}"
    publisher, runtime, book = build_publisher(broker_type, connection), _Actor(), MemoryBook()
    config = TriggerConfig(queue_name=queue, consumer_group="g", ack_policy=policy, max_retries=1, concurrency=2)
    adapter = build_adapter(broker_type, connection, queue, "g", config.prefetch)
    trigger = QueueTrigger(
        config, adapter, runtime, book=book, dedup=InMemoryDedupStore(), sleep=lambda _: asyncio.sleep(0)
    )
    await publisher.connect()
    answers = await publisher.publish(
        [
            OutgoingMessage(
                queue,
                b"{" if one.fate == "unreadable" else json.dumps({"n": number, "fate": one.fate}).encode(),
                {"X-Event-Name": one.fate, "line": one.key, "number": str(number)},
                one.key,
            )
            for number, one in enumerate(sent)
        ]
    )
    assert answers == [None] * len(sent)
    again = sum(one.fate == "wrong" for one in sent) if policy == "requeue" else 0
    await trigger.start()
    await until_real(lambda: sum(trigger.counts.consumed.values()) >= len(sent) + again)
    health, lag = await trigger.health(), await adapter.lag()
    await trigger.stop()
    letters = await _letters(broker_type, connection, f"{queue}.dlq", trigger.counts.dead_letters)
    await publisher.close()
    # Of two lines either may be the first; of messages without a key, any.
    ran = {line: events if line else sorted(events) for line, events in runtime.events.items()}
    return {
        "ran": ran,
        "tries": runtime.tries,
        "letters": letters,
        "rows": sorted((row.status, row.event_name, row.retry_count, row.error_message) for row in book.rows.values()),
        "health": health,
        "lag": lag,
    }


async def _letters(broker_type: str, connection: dict[str, Any], queue: str, count: int) -> list[Any]:
    if not count:
        return []
    adapter = build_adapter(broker_type, connection, queue, "reader")
    await adapter.connect()
    found: list[Any] = []
    try:
        async with asyncio.timeout(10), aclosing(_generator(adapter)) as messages:
            while len(found) < count:
                letter = await anext(messages)
                await adapter.ack(letter)
                headers = dict(letter.headers)
                del headers["x-dead-message-id"], headers["x-dead-source"]
                tries = [line.partition(" at ")[0] for line in json.loads(headers.pop("x-dead-history"))]
                found.append((letter.body, headers, letter.key, tries))
    finally:
        await adapter.close()
    return sorted(found, key=lambda letter: letter[1]["number"])


async def _generator(adapter: QueueAdapter) -> AsyncGenerator[RawMessage, None]:
    async for message in adapter.consume():
        yield message


_FATES: Final = ("good", "later", "never", "wrong", "unreadable")


@pytest.mark.redis
@PROPERTY
@given(
    sent=st.lists(st.builds(_Sent, st.sampled_from(["", "a", "b"]), st.sampled_from(_FATES)), min_size=1, max_size=6),
    policy=POLICIES,
)
def test_property_01_an_adapter_can_be_swapped_for_another(redis_url: str, sent: list[_Sent], policy: str) -> None:
    async def story() -> None:
        in_memory = await _observe("memory", {"name": "swap"}, sent, policy)
        on_redis = await _observe("redis", {"url": redis_url}, sent, policy)
        MemoryBroker.reset("swap")
        assert in_memory == on_redis
        # Which would be true as well if nothing had happened.
        assert in_memory["lag"] == 0
        assert in_memory["health"].status == "healthy"
        ran = {number for events in in_memory["ran"].values() for _, number in events}
        assert ran == {
            number
            for number, one in enumerate(sent)
            if one.fate in ("good", "later") or (one.fate == "wrong" and policy == "requeue")
        }
        for line, events in in_memory["ran"].items():
            numbers = [number for _, number in events]
            assert not line or policy == "requeue" or numbers == sorted(numbers)

    asyncio.run(story())


# 2: an envelope has all fields, rightly mapped -----------------------------------------------------------


def _in_any_case(name: str, upper: list[bool]) -> str:
    return (
        "".join(letter.upper() if up else letter for letter, up in zip(name, upper, strict=False)) + name[len(upper) :]
    )


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
def test_property_02_an_envelope_has_all_fields_rightly_mapped(
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

    async def story() -> None:
        config: dict[str, Any] = (
            {} if usual else dict(zip(("event_name_header", "dedup_header", "tenant_header"), names, strict=True))
        )
        runtime = _Listener()
        config = {name: _in_any_case(header, upper) for name, header in config.items()}
        world = World(runtime, **config)
        raws = _seen(world)
        sent = headers | known
        message_id = world.write(value, headers={_in_any_case(name, upper): text for name, text in sent.items()})
        await asyncio.sleep(age_s)
        await world.run(1)
        world.close()
        (call,) = runtime.calls
        context = call.context
        assert same(context["message"], value)
        assert context["headers"] == sent
        assert (context["message_id"], context["source"]) == (message_id, "orders")
        assert datetime.fromisoformat(context["received_at"]) == START
        assert call.event_name == (event or "queue_message")
        assert call.tenant_id == (tenant or "default")
        assert call.key == f"orders:workers:{dedup or message_id}"
        # The envelope itself says of what is missing that it is missing.
        (raw,) = raws
        envelope = MessageEnvelope.from_raw(raw, "orders", parser_of("json"), HeaderNames(*names))
        assert (envelope.event_name, envelope.dedup_key, envelope.tenant_id) == (event, dedup, tenant)
        assert same(envelope.payload, value)
        assert (envelope.message_id, envelope.headers, envelope.source) == (message_id, sent, "orders")
        assert envelope.received_at == START
        assert envelope.context() == context

    play(story())


class _Listener(Script):
    """Takes any payload."""

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        return "run"


def _seen(world: World) -> list[RawMessage]:
    """The messages that the trigger takes from its adapter, from now on."""
    raws: list[RawMessage] = []
    take = world.adapter._next

    def watched() -> RawMessage | None:
        raw = take()
        if raw is not None:
            raws.append(raw)
        return raw

    world.adapter._next = watched  # type: ignore[method-assign]
    return raws


# 3: json, text and binary parse without loss -------------------------------------------------------------


def _event_of(written: tuple[Any, bytes]) -> tuple[Any, bytes]:
    value, body = written
    return value, b'{"specversion": "1.0", "id": "1", "source": "/s", "type": "t", "data": %s}' % body


#: The parser, what was meant, and how it is written.
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

    async def story() -> None:
        runtime = _Listener()
        world = World(runtime, parser_type=parser)
        world.write(body)
        await world.run(1)
        world.close()
        assert [row.status for row in world.rows] == [ExecutionStatus.SUCCESS]
        (call,) = runtime.calls
        assert same(call.context["message"], value)
        # JSON goes on as it came, so that no number is rounded on its way to a task.
        if parser in ("json", "cloudevents"):
            assert call.message_json is not None
            assert call.message_json.strip() == body.strip() or parser == "cloudevents"
            assert same(json.loads(msgspec.json.encode(call.message())), value)
        elif parser == "text":
            assert call.message() == value

    play(story())


# 4: unparsable → DLQ with the reason ---------------------------------------------------------------------


class _Bad(NamedTuple):
    parser: str
    body: bytes
    headers: dict[str, str]
    #: A word of the reason.
    reason: str


_OPEN: Final = st.lists(JSON, min_size=1, max_size=3) | st.dictionaries(TEXTS, JSON, min_size=1, max_size=3)
#: What is cut off is not JSON any more.
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
@given(bad=_BAD, policy=POLICIES, headers=HEADERS, others=st.integers(0, 2), place=st.integers(0, 2))
def test_property_04_what_cannot_be_parsed_is_a_dead_letter_with_the_reason(
    bad: _Bad, policy: str, headers: dict[str, str], others: int, place: int
) -> None:
    async def story() -> None:
        runtime = Script()
        world = World(runtime, parser_type=bad.parser, ack_policy=policy, payload_limit=5_000, enable_dedup=False)
        written, bad_id = [], ""
        for number in range(others + 1):
            if number == min(place, others):
                bad_id = world.write(bad.body, headers=headers | bad.headers)
            else:
                written.append(world.write(_GOOD[bad.parser]))
        async with world.trigger:
            await world.off(others + 1)
            # Acknowledged: the broker has nothing left for this group, in hand or not.
            assert (await world.adapter.lag(), world.trigger.in_flight) == (0, 0)
            assert not world.adapter._deliveries
        world.close()
        (letter,) = world.dead
        assert letter.body == bad.body
        assert {name: letter.headers[name] for name in headers | bad.headers} == headers | bad.headers
        assert bad.reason in letter.headers["x-dead-reason"]
        assert (letter.headers["x-dead-source"], letter.headers["x-dead-message-id"]) == ("orders", bad_id)
        assert world.words(bad_id) == ["dlq"]
        assert len(runtime.calls) == others
        assert not world.slept
        assert {row.message_id: row.status for row in world.rows} == {
            bad_id: ExecutionStatus.UNPARSABLE,
            **dict.fromkeys(written, ExecutionStatus.SUCCESS),
        }
        row = next(row for row in world.rows if row.message_id == bad_id)
        assert row.error_message == letter.headers["x-dead-reason"]

    play(story())


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
    # What is left out is as it is by default.
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
#: Payloads: one that always fails, one that fails for good at once, twins.
_FAILS, _WRONG, _TWIN = 1, 2, 3


@PROPERTY
@given(config=_configs())
def test_property_05_configuration_takes_effect(config: dict[str, Any]) -> None:
    """From the text of a file to what the trigger does."""
    text = yaml.safe_dump(config | {"adapter": {"type": "memory"}, "runtime": {"callable": "a:b"}})
    (entry,) = load_text(text, environment={})
    concurrency = config.get("concurrency", 1)
    wanted = SimpleNamespace(
        **(_DEFAULTS | {"dlq_name": config["queue_name"] + ".dlq", "prefetch": max(10, 2 * concurrency)} | config)
    )

    async def story() -> None:
        runtime = _Busy()
        world = World(runtime, told=entry)
        asked = _asked_for_lag(world)
        headers = {wanted.event_name_header: "paid", wanted.tenant_header: "acme"}
        for number in range(wanted.prefetch + 2):
            world.write(str(100 + number).encode())
        await world.trigger.start()
        # As many at once as told, and as many in hand.
        await rest()
        assert runtime.now == wanted.concurrency
        assert (world.trigger.in_flight, world.counts.active_workers) == (wanted.prefetch, wanted.concurrency)
        runtime.go.set()
        await world.off(wanted.prefetch + 2)
        kinds = {"json": int, "text": str, "binary": bytes}
        assert {type(call.context["message"]) for call in runtime.calls} == {kinds[wanted.parser_type]}
        # Retries, and where the dead letter goes.
        world.write(b"%d" % _FAILS, headers=headers)
        await until(lambda: world.broker.messages(wanted.dlq_name), "a dead letter")
        tries = runtime.times[_FAILS]
        assert [later - earlier for earlier, later in itertools.pairwise(tries)] == pytest.approx(
            [wanted.retry_backoff_base * wanted.retry_backoff_multiplier**n for n in range(wanted.max_retries)],
            abs=1e-3,
        )
        assert len(tries) == 1 + wanted.max_retries
        call = runtime.calls[-1]
        assert (call.event_name, call.tenant_id, call.focus) == ("paid", "acme", wanted.focus)
        assert call.context["source"] == wanted.queue_name
        # What fails for good goes by the policy.
        wrong_id = world.write(b"%d" % _WRONG)
        await until(lambda: world.words(wrong_id), "the policy")
        await rest()
        assert world.words(wrong_id)[0] == wanted.ack_policy
        # A key is known for its window.
        twins = {wanted.dedup_header: "twin"}
        for pause_s, runs in ((0, 1), (wanted.idempotency_window - 1, 1), (2, 2)):
            await asyncio.sleep(pause_s)
            before = world.taken_care_of
            world.write(b"%d" % _TWIN, headers=twins)
            await world.off(before + 1)
            if wanted.enable_dedup:
                assert len(runtime.times[_TWIN]) == runs
        assert wanted.enable_dedup or len(runtime.times[_TWIN]) == 3
        # The broker is asked how many wait, as often as told.
        life_s = asyncio.get_running_loop().time()
        metrics = wanted.metrics
        assert len(asked) == pytest.approx(life_s // metrics["export_interval"] + 1 if metrics["enabled"] else 0, abs=1)
        assert metrics["enabled"] == bool(asked)
        await world.trigger.stop()
        # This group has got it all; another one has not got any of it.
        assert await _waiting(world, wanted.queue_name, wanted.consumer_group) == 0
        assert await _waiting(world, wanted.queue_name, "another-group") == wanted.prefetch + 7
        world.close()

    play(story())


class _Busy(Script):
    """Waits with the first messages, so that it can be seen how many there are at once."""

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
        if number == _WRONG and len(times) == 1:
            raise Fatal("never")
        return "run"


def _asked_for_lag(world: World) -> list[float]:
    asked: list[float] = []
    lag = world.adapter.lag

    async def watched() -> int | None:
        asked.append(asyncio.get_running_loop().time())
        return await lag()

    world.adapter.lag = watched  # type: ignore[method-assign]
    return asked


async def _waiting(world: World, queue: str, group: str) -> int | None:
    adapter = MemoryAdapter(MemoryConfig(name=world.name), queue, group)
    await adapter.connect()
    lag = await adapter.lag()
    await adapter.close()
    return lag


# 6: start, pause, resume, stop move the state as they should, and it can be asked ------------------------

_STEPS: Final = st.lists(
    st.sampled_from(["start", "pause", "resume", "stop", "write", "write", "write", "down", "up"]), max_size=14
)


@PROPERTY
@given(steps=_STEPS, concurrency=st.integers(1, 3), early=st.booleans())
@example(steps=["down", "write", "pause", "up", "resume"], concurrency=1, early=True)
def test_property_06_the_state_moves_as_it_should_and_can_be_asked(
    steps: list[str], concurrency: int, early: bool
) -> None:
    async def story() -> None:
        runtime = _Outage()
        world = World(runtime, concurrency=concurrency)
        life, paused, written = "new", False, 0
        for step in (["start"] if early else []) + steps:
            tried_before = sum(map(len, runtime.tries.values()))
            match step:
                case "write":
                    world.write(written)
                    written += 1
                case "down" | "up":
                    runtime.down = step == "down"
                case "stop":
                    await world.trigger.stop()
                    await world.trigger.stop()
                    life = "stopped"
                case "start" if life == "new":
                    await world.trigger.start()
                    life = "running"
                case "pause" | "resume" if life == "running":
                    await (world.trigger.pause() if step == "pause" else world.trigger.resume())
                    paused = step == "pause"
                case _:
                    with pytest.raises(UsageError):
                        await getattr(world.trigger, step)()
            works = life == "running" and not paused
            if works and not runtime.down:
                # Whatever was kept up goes through now, an outage's leavings a while later.
                await until(lambda: len(runtime.ran) == written, "all that was written")  # noqa: B023
            await (rest() if works else asyncio.sleep(100))
            if not works:
                assert sum(map(len, runtime.tries.values())) == tried_before, (
                    f"handed over while {life}, paused: {paused}"
                )
            holding = life == "running" and runtime.stuck
            state = "holding" if holding else "paused" if life == "running" and paused else life
            await _is_in(world, state, paused and life != "new", concurrency)
        await world.trigger.stop()
        assert world.trigger.state is TriggerState.STOPPED
        world.close()
        assert runtime.ran == sorted(set(runtime.ran))

    play(story())


async def _is_in(world: World, state: str, paused: bool, concurrency: int) -> None:
    trigger = world.trigger
    health = await trigger.health()
    running = state in ("running", "paused", "holding")
    assert trigger.state == state
    assert trigger.ready == (state in ("running", "paused"))
    assert health.status == ("healthy" if state == "running" else state if running else "stopped")
    assert (health.running, health.adapter_healthy) == (running, running)
    assert health.active_workers == (concurrency if running else 0)
    assert health.paused == paused


class _Outage(Script):
    """`down`: what it stands for does not answer."""

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
        """Whether something was tried that has not got through."""
        return bool(self.tried - set(self.ran))
