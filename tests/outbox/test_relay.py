"""The relay on real stores: order per key, retries, DEAD and revival, several relays, brokers and relays that die."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from holdfast.brokers.memory import MemoryBroker
from holdfast.brokers.port import OutgoingMessage
from holdfast.errors import InvalidOption
from holdfast.ledger.port.messages import OutboxEvent, OutboxStatus, OutboxStore, PublishResult
from holdfast.observe.counters import Counters
from holdfast.outbox.destinations import Answer, Destination, Published, PublishFailed, build_destinations
from holdfast.outbox.relay import Relay, publish_results
from holdfast.outbox.writer import NewOutboxEvent
from holdfast.settings import Settings
from tests.outbox.support import World, transaction, until

MakeWorld = Callable[..., Any]


def orders(keys: int, each: int) -> list[NewOutboxEvent]:
    """`each` numbered events of every key, mixed."""
    return [
        NewOutboxEvent(topic="orders", key=f"key-{key}", payload={"key": key, "n": number})
        for number in range(each)
        for key in range(keys)
    ]


def check_order(bodies: Sequence[Any], keys: int, each: int, *, repeats: bool = False) -> None:
    """All there, of each key in order; with `repeats` some of them again, from an earlier one on."""
    by_key: dict[int, list[int]] = defaultdict(list)
    for body in bodies:
        by_key[body["key"]].append(body["n"])
    assert sorted(by_key) == list(range(keys))
    for numbers in by_key.values():
        if repeats:
            seen = -1
            for number in numbers:
                assert number <= seen + 1, numbers
                seen = max(seen, number)
            assert seen == each - 1
        else:
            assert numbers == list(range(each))


# What arrives ----------------------------------------------------------------------------------------


async def test_a_cloudevent_arrives(world: World) -> None:
    (written,) = await world.write(
        NewOutboxEvent(
            topic="orders", key="o-7", payload={"n": 1}, headers={"x-event-name": "order.paid", "x-own": "ü"}
        )
    )
    async with world.relay():
        await until(lambda: world.all_are(OutboxStatus.SENT))
    (message,) = world.broker.messages("orders")
    assert (message.key, message.message_id) == ("o-7", written)
    (event,) = await world.events()
    document = msgspec.json.decode(message.body or b"")
    stamp = document.pop("time")
    assert stamp.endswith("Z")
    assert stamp[:10] == msgspec.json.decode(msgspec.json.encode(stamp))[:10]
    assert document == {
        "specversion": "1.0",
        "id": written,
        "source": "holdfast/default",
        "type": "order.paid",
        "subject": "o-7",
        "datacontenttype": "application/json",
        "tenantid": "default",
        "data": {"n": 1},
    }
    assert message.headers == {
        "content-type": "application/cloudevents+json",
        "x-event-name": "order.paid",
        "x-dedup-key": written,
        "x-tenant-id": "default",
        "x-own": "ü",
    }
    assert event.sent_at_ms is not None
    assert event.last_error == ""


async def test_bytes_and_no_key(make_world: MakeWorld) -> None:
    world: World = await make_world(outbox_source="shop", namespace="")
    await world.write(NewOutboxEvent(topic="files", payload=b"\x00\xff", headers={"content-type": "image/png"}))
    async with world.relay():
        await until(lambda: world.all_are(OutboxStatus.SENT))
    (message,) = world.broker.messages("files")
    document = msgspec.json.decode(message.body or b"")
    assert (document["data_base64"], document["datacontenttype"]) == ("AP8=", "image/png")
    assert (document["source"], document["type"]) == ("shop", "files")
    assert "subject" not in document
    assert "data" not in document
    assert "holdfast-encoding" not in message.headers


async def test_plain(make_world: MakeWorld) -> None:
    world: World = await make_world(outbox_envelope="plain")
    await world.write(NewOutboxEvent(topic="t", payload={"n": 1}), NewOutboxEvent(topic="t", payload=b"raw"))
    async with world.relay():
        await until(lambda: world.all_are(OutboxStatus.SENT))
    kinds = {message.body: message.headers["content-type"] for message in world.broker.messages("t")}
    assert kinds == {b'{"n":1}': "application/json", b"raw": "application/octet-stream"}
    assert all(message.headers["x-event-name"] == "t" for message in world.broker.messages("t"))


async def test_order_per_key_over_many_batches(make_world: MakeWorld) -> None:
    world: World = await make_world(outbox_batch=20)
    await world.write(*orders(12, 25))
    async with world.relay() as relay:
        await until(lambda: world.all_are(OutboxStatus.SENT))
        # What comes while it runs is found at once, not at the next look.
        await world.write(NewOutboxEvent(topic="late", payload=1))
        await until(lambda: len(world.broker.messages("late")) == 1)
    check_order(world.bodies(), 12, 25)
    numbers = relay.numbers
    assert sum(numbers.success.buckets) == sum(numbers.delay.buckets) == 301
    assert sum(numbers.failure.buckets) + sum(numbers.dead.buckets) == 0


# Failures --------------------------------------------------------------------------------------------


async def test_a_key_that_fails_holds_up_only_itself(world: World) -> None:
    tries: list[int] = []

    def refuse(message: OutgoingMessage) -> bool:
        if message.key != "key-1":
            return False
        tries.append(1)
        return len(tries) < 4

    world.broker.refuse = refuse
    await world.write(*orders(3, 4))
    async with world.relay() as relay:
        await until(lambda: world.all_are(OutboxStatus.SENT))
    check_order(world.bodies(), 3, 4)
    first, *later = await world.events(key="key-1")
    assert (first.attempt_count, first.last_error) == (3, "")
    assert {event.attempt_count for event in later} == {0}, "those that waited were not tried"
    assert sum(relay.numbers.failure.buckets) == 3


async def test_dead_after_the_limit_and_revived(make_world: MakeWorld) -> None:
    world: World = await make_world(outbox_max_attempts=2)
    world.broker.down = True
    (written,) = await world.write(NewOutboxEvent(topic="orders", key="k", payload={"n": 1}))
    async with world.relay() as relay:
        await until(lambda: world.all_are(OutboxStatus.RETRYING))
        (event,) = await world.events()
        assert (event.attempt_count, event.sent_at_ms) == (1, None)
        assert event.next_retry_at_ms is not None
        await until(lambda: world.all_are(OutboxStatus.DEAD))
        (event,) = await world.events()
        assert (event.attempt_count, event.next_retry_at_ms) == (2, None)
        assert "down" in event.last_error
        world.broker.down = False
        store = await world.store()
        assert await store.retry_events(None, [written], "ann", "it is back") == 1
        await until(lambda: world.all_are(OutboxStatus.SENT))
    assert [message.message_id for message in world.broker.messages("orders")] == [written]
    numbers = relay.numbers
    assert [sum(kind.buckets) for kind in (numbers.success, numbers.failure, numbers.dead)] == [1, 1, 1]


@pytest.mark.parametrize("blocks", [True, False])
async def test_a_dead_event_blocks_its_key_or_not(make_world: MakeWorld, blocks: bool) -> None:
    world: World = await make_world(outbox_max_attempts=1, outbox_dead_blocks=blocks)
    world.broker.refuse = lambda message: b'"n":0' in (message.body or b"")
    await world.write(*orders(1, 3))
    await world.write(NewOutboxEvent(topic="orders", key="other", payload={"n": 9}))
    async with world.relay():
        await until(lambda: any(body["n"] == 9 for body in world.bodies()))
        if blocks:
            await world.write(NewOutboxEvent(topic="orders", key="third", payload={"n": 10}))
            await until(lambda: any(body["n"] == 10 for body in world.bodies()))
            await until(lambda: statuses_are(world, ["DEAD", "NEW", "NEW", "SENT", "SENT"]))
            world.broker.refuse = lambda _: False
            store = await world.store()
            assert await store.retry_events(None, [(await world.events())[0].id], "ann", "") == 1
            await until(lambda: world.all_are(OutboxStatus.SENT))
            assert [body["n"] for body in world.bodies() if "key" in body] == [0, 1, 2]
        else:
            await until(lambda: len(world.bodies()) == 3)
            await until(lambda: statuses_are(world, ["DEAD", "SENT", "SENT", "SENT"]))


async def statuses_are(world: World, wanted: list[str]) -> bool:
    return await world.statuses() == wanted


async def test_a_broker_that_is_down_holds_up_no_other(make_world: MakeWorld, namespace: str) -> None:
    other = f"{namespace}-other"
    targets = {
        "default": {"type": "memory", "connection": {"name": namespace}},
        "other": {"type": "memory", "connection": {"name": other}},
    }
    world: World = await make_world(outbox_targets=targets)
    world.broker.down = True
    await world.write(*orders(5, 2))
    await world.write(*[NewOutboxEvent(topic="orders", key="k", payload=n, destination="other") for n in range(5)])
    try:
        async with world.relay():
            await until(lambda: len(MemoryBroker.named(other).messages("orders")) == 5)
            await until(lambda: is_retrying(world, 5))
            assert world.bodies() == []
            world.broker.down = False
            await until(lambda: world.all_are(OutboxStatus.SENT))
    finally:
        MemoryBroker.reset(other)
    check_order(world.bodies(), 5, 2)


async def is_retrying(world: World, at_least: int) -> bool:
    return len(await world.events(status=OutboxStatus.RETRYING)) >= at_least


async def test_an_unknown_destination_is_told_of_and_left_to_those_who_know_it(
    make_world: MakeWorld, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    world, other = await make_world(), await make_world()
    targets = {"mars": {"type": "memory", "connection": {"name": namespace}}}
    knows = other.app.settings.model_copy(update={"outbox_targets": outbox_targets(targets)})
    async with world.relay():
        await world.write(NewOutboxEvent(topic="orders", payload=1, destination="mars"))
        await until(lambda: "'mars'" in caplog.text)
        assert "serves default" in caplog.text
        (event,) = await world.events()
        assert (event.status, event.attempt_count) == (OutboxStatus.NEW, 0)
        async with other.relay(knows):
            await until(lambda: world.all_are(OutboxStatus.SENT))
    assert world.bodies() == [1]


def outbox_targets(targets: dict[str, Any]) -> Any:
    return Settings(url="sqlite://", outbox_targets=targets).outbox_targets


class Spy:
    """A store, and how often it was asked."""

    def __init__(self, store: OutboxStore) -> None:
        self._store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._store, name)


async def test_what_another_relay_is_at_is_not_asked_for_all_the_time(world: World) -> None:
    await world.write(NewOutboxEvent(topic="orders", key="k", payload=1))
    (event,) = await world.events()
    store = await world.store()
    lanes = await store.acquire_lanes("another", ["default"], 64, 60_000)
    mark = PublishResult(
        tenant_id=event.tenant_id, id=event.id, status=OutboxStatus.RETRYING, attempt_count=1, next_retry_at_ms=1
    )
    assert await store.record_results("another", lanes, [mark])
    spy: Any = Spy(store)
    relay = Relay(spy, build_destinations(world.app.settings, None), world.app.settings, Counters())
    running = asyncio.create_task(relay.run())
    await asyncio.sleep(1.5)
    assert 0 < spy.calls["acquire_lanes"] < 25, spy.calls
    await store.release_lanes("another")
    await until(lambda: world.all_are(OutboxStatus.SENT))
    relay.stop()
    await running


async def test_a_flight_that_fails_is_not_tried_again_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.write(NewOutboxEvent(topic="orders", key="k", payload=1))
    store = await world.store()
    tries: list[float] = []

    async def due_events(*_: Any, **__: Any) -> Any:
        tries.append(time.monotonic())
        raise RuntimeError("a row that cannot be read")

    monkeypatch.setattr(store, "due_events", due_events)
    async with world.relay():
        await asyncio.sleep(2)
    assert len(tries) < 12, len(tries)
    monkeypatch.undo()
    async with world.relay():
        await until(lambda: world.all_are(OutboxStatus.SENT))


async def test_rows_that_cannot_be_read_stop_no_others(world: World) -> None:
    await world.write(*[NewOutboxEvent(topic="orders", payload=number) for number in range(4)])
    _, deep, odd, _ = await world.events()
    async with transaction(world.url) as connection:
        await connection.execute("UPDATE outbox_events SET lane = 7")
        await connection.execute(f"UPDATE outbox_events SET payload = '{'[' * 20_000}' WHERE id = '{deep.id}'")
        late = "9223372036854775" if world.url.startswith("sqlite:") else "'infinity'"
        await connection.execute(f"UPDATE outbox_events SET created_at = {late} WHERE id = '{odd.id}'")
    async with world.relay():
        await until(lambda: len(world.bodies()) >= 2 and world.bodies()[-1] == 3)
    store = await world.store()
    lost = await store.get("default", deep.id)
    assert lost is not None
    assert lost.status is OutboxStatus.DEAD


class Slow(Destination):
    """Sends nothing for a while, and remembers what it was given."""

    def __init__(self, seconds: float = 0.0, answer: Answer | None = None) -> None:
        self.seconds = seconds
        self.answer = answer or Published()
        self.batches: list[list[str]] = []
        self.began = asyncio.Event()
        self.closed = False

    async def send(self, events: Sequence[OutboxEvent], timeout_s: float) -> list[Answer]:
        self.batches.append([event.id for event in events])
        self.began.set()
        await asyncio.sleep(self.seconds)
        return [self.answer for _ in events]

    async def close(self) -> None:
        self.closed = True


async def test_errors_are_cut_and_without_secrets(world: World) -> None:
    await world.write(NewOutboxEvent(topic="t", payload=1))
    failing = Slow(answer=PublishFailed("amqp://app:s3cret@host/ refused, password=hunter2 " + "x " * 5_000))
    async with world.relay(default=failing):
        await until(lambda: world.all_are(OutboxStatus.RETRYING))
    (event,) = await world.events()
    assert "s3cret" not in event.last_error
    assert "hunter2" not in event.last_error
    assert len(event.last_error) <= 1_000


def tried(attempts: int) -> OutboxEvent:
    """An event that has failed so often."""
    return OutboxEvent(
        tenant_id="t",
        id="e",
        destination="d",
        topic="t",
        key="",
        payload="1",
        headers={},
        status=OutboxStatus.RETRYING,
        attempt_count=attempts,
        next_retry_at_ms=1,
        last_error="",
        created_at_ms=1,
        sent_at_ms=None,
        position=1,
    )


def test_backoff_doubles_from_a_second_to_ten_minutes() -> None:
    settings = Settings(url="sqlite://")
    waits = []
    for attempts in range(9):
        (mark,) = publish_results([tried(attempts)], [PublishFailed("x")], settings, 0)
        assert (mark.status, mark.attempt_count) == (OutboxStatus.RETRYING, attempts + 1)
        waits.append(mark.next_retry_at_ms)
    assert waits == [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000, 256_000]
    (mark,) = publish_results([tried(9)], [PublishFailed("x")], settings, 0)
    assert (mark.status, mark.attempt_count, mark.next_retry_at_ms) == (OutboxStatus.DEAD, 10, None)
    long = settings.model_copy(update={"outbox_max_attempts": 99})
    (mark,) = publish_results([tried(60)], [PublishFailed("x")], long, 0)
    assert mark.next_retry_at_ms == 600_000


def test_a_hopeless_one_is_dead_at_once_and_a_passing_trouble_never() -> None:
    settings = Settings(url="sqlite://")
    (dead,) = publish_results([tried(0)], [PublishFailed("x", permanent=True)], settings, 0)
    (alive,) = publish_results([tried(500)], [PublishFailed("x", outage=True)], settings, 0)
    assert (dead.status, alive.status, alive.next_retry_at_ms) == (OutboxStatus.DEAD, OutboxStatus.RETRYING, 30_000)


def test_targets_that_cannot_be_are_told_at_the_start() -> None:
    for target, words in (
        ({"type": "carrier-pigeon"}, "carrier-pigeon"),
        ({"type": "memory", "connection": {"password": "hunter2"}}, "password"),
    ):
        settings = Settings.load(url="sqlite://", outbox_targets={"default": target})
        with pytest.raises(InvalidOption, match=words) as caught:
            build_destinations(settings, None)
        assert "outbox_targets.default" in str(caught.value)
        assert "hunter2" not in str(caught.value)
    with pytest.raises(InvalidOption, match="transactional enqueue"):
        Settings.load(url="sqlite://", outbox_targets={"holdfast": {"type": "memory"}})


# Several relays, and relays that die -----------------------------------------------------------------


class DeadlyStore:
    """The store of a relay that dies when it would mark, without a word to anybody."""

    def __init__(self, store: OutboxStore) -> None:
        self._store = store
        self.reached = asyncio.Event()
        self._for_ever = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def record_results(self, relay: str, lanes: Sequence[int], marks: Sequence[PublishResult]) -> bool:
        self.reached.set()
        await self._for_ever.wait()
        return False

    async def release_lanes(self, relay: str, lanes: Sequence[int] | None = None) -> None:
        """The dead release nothing."""


async def test_killed_between_publish_and_mark(make_world: MakeWorld) -> None:
    world: World = await make_world(outbox_lease_s=1.0)
    await world.write(*orders(4, 6))
    store: Any = DeadlyStore(await world.store())
    victim = Relay(store, build_destinations(world.app.settings, None), world.app.settings, Counters())
    running = asyncio.create_task(victim.run())
    await store.reached.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    published = len(world.bodies())
    assert published > 0
    assert await world.all_are(OutboxStatus.NEW)
    async with world.relay():
        await until(lambda: world.all_are(OutboxStatus.SENT))
    check_order(world.bodies(), 4, 6, repeats=True)
    messages = world.broker.messages("orders")
    ids = [message.message_id for message in messages]
    assert len(ids) == 24 + published
    # The same event has the same id each time.
    assert len(set(ids)) == 24
    assert {message.message_id for message in messages[:published]} <= {m.message_id for m in messages[published:]}


class FrozenStore:
    """The store of a relay that gets lanes once, and then hears nothing more of them in time."""

    def __init__(self, store: OutboxStore) -> None:
        self._store = store
        self._taken = False
        self.marks: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def acquire_lanes(self, *asked: Any, **more: Any) -> list[int]:
        lanes = [] if self._taken else await self._store.acquire_lanes(*asked, **more)
        self._taken = self._taken or bool(lanes)
        return lanes

    async def record_results(self, *asked: Any) -> bool:
        self.marks.append(await self._store.record_results(*asked))
        return self.marks[-1]


@pytest.mark.parametrize("knows", [True, False])
async def test_lanes_that_were_lost_are_somebody_else_s(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    world: World = await make_world(outbox_lease_s=1.0)
    store: Any = FrozenStore(await world.store())
    (written,) = await world.write(NewOutboxEvent(topic="orders", key="k", payload={"key": 0, "n": 0}))
    slow = Slow(seconds=1.5, answer=PublishFailed("late"))
    late = Relay(store, {"default": slow}, world.app.settings, Counters())
    if not knows:
        # A clock that does not see it: then the store does.
        monkeypatch.setattr(late._lanes, "remaining_s", lambda _: 1.0)
    running = asyncio.create_task(late.run())
    await slow.began.wait()
    # Its lease runs out while the broker keeps it waiting.
    async with world.relay():
        await until(lambda: world.all_are(OutboxStatus.SENT))
        await until(lambda: not late._loops[0]._flights)
    late.stop()
    await running
    (event,) = await world.events()
    assert (event.status, event.attempt_count) == (OutboxStatus.SENT, 0), "who lost the lanes marks nothing"
    assert slow.batches == [[written]]
    assert store.marks == ([] if knows else [False])


async def test_a_relay_that_is_alive_keeps_its_lanes(make_world: MakeWorld) -> None:
    world: World = await make_world(outbox_lease_s=2.0)
    (written,) = await world.write(NewOutboxEvent(topic="orders", key="k", payload=1))
    slow = Slow(seconds=2.5)
    async with world.relay(default=slow):
        await slow.began.wait()
        async with world.relay():
            await until(lambda: world.all_are(OutboxStatus.SENT))
    assert slow.batches == [[written]]
    assert world.broker.messages("orders") == []


class SleepyStore(FrozenStore):
    """… and that takes its time to read."""

    def __init__(self, store: OutboxStore, seconds: float) -> None:
        super().__init__(store)
        self._seconds = seconds
        self.read = 0

    async def due_events(self, *asked: Any, **more: Any) -> list[OutboxEvent]:
        events = await self._store.due_events(*asked, **more)
        await asyncio.sleep(self._seconds)
        self.read += len(events)
        return events


async def test_what_might_not_be_confirmed_within_the_lease_is_not_sent(make_world: MakeWorld) -> None:
    world: World = await make_world(outbox_lease_s=1.0)
    await world.write(NewOutboxEvent(topic="t", payload=1))
    for seconds, batches in ((0.7, 0), (0.0, 1)):
        store: Any = SleepyStore(await world.store(), seconds)
        slow = Slow()
        relay = Relay(store, {"default": slow}, world.app.settings, Counters())
        running = asyncio.create_task(relay.run())
        await until(lambda store=store, relay=relay: bool(store.read) and not relay._loops[0]._flights)
        relay.stop()
        await running
        assert len(slow.batches) == batches
    assert await world.statuses() == ["SENT"]


async def test_three_relays_share_the_work_and_none_does_it_twice(make_world: MakeWorld) -> None:
    world: World = await make_world(outbox_batch=25)
    others = [await make_world(outbox_batch=25) for _ in range(2)]
    await world.write(*orders(40, 15))
    async with world.relay() as one, others[0].relay() as two, others[1].relay() as three:
        await until(lambda: world.all_are(OutboxStatus.SENT), 30)
    check_order(world.bodies(), 40, 15)
    counts = [sum(relay.numbers.success.buckets) for relay in (one, two, three)]
    assert sum(counts) == 600


async def test_stopping_finishes_what_is_on_its_way(world: World) -> None:
    await world.write(NewOutboxEvent(topic="t", payload=1))
    slow = Slow(seconds=0.3)
    async with world.relay(default=slow) as relay:
        await slow.began.wait()
        relay.stop()
    assert await world.statuses() == ["SENT"]
    assert slow.closed
    # Its lanes are free at once.
    await world.write(NewOutboxEvent(topic="orders", payload={"n": 1}))
    async with world.relay():
        await until(lambda: world.all_are(OutboxStatus.SENT), 5)


async def test_sent_events_are_deleted_when_their_time_is_over(make_world: MakeWorld) -> None:
    world: World = await make_world(outbox_retention_s=0.001)
    await world.write(*orders(2, 2))
    async with world.relay():
        await until(lambda: len(world.bodies()) == 4)
        await until(lambda: world.all_are(OutboxStatus.SENT))
    async with world.relay():
        await until(lambda: no_events(world))


async def no_events(world: World) -> bool:
    return not await world.events()
