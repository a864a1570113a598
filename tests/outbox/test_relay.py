"""The relay on real stores: order per key, retries, DEAD events, several relays, outages and killed relays."""

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
from tests.outbox.support import Deployment, transaction, until

MakeDeployment = Callable[..., Any]


def orders(keys: int, each: int) -> list[NewOutboxEvent]:
    """Return `each` numbered events of every key, interleaved."""
    return [
        NewOutboxEvent(topic="orders", key=f"key-{key}", payload={"key": key, "n": number})
        for number in range(each)
        for key in range(keys)
    ]


def check_order(bodies: Sequence[Any], keys: int, each: int, *, repeats: bool = False) -> None:
    """Check that all events arrived in order per key. With `repeats`, a key may restart from an earlier event."""
    by_key: dict[int, list[int]] = defaultdict(list)
    for body in bodies:
        by_key[body["key"]].append(body["n"])
    assert sorted(by_key) == list(range(keys))
    for numbers in by_key.values():
        if repeats:
            highest = -1
            for number in numbers:
                assert number <= highest + 1, numbers
                highest = max(highest, number)
            assert highest == each - 1
        else:
            assert numbers == list(range(each))


# Published messages ----------------------------------------------------------------------------------------


async def test_an_event_is_published_as_a_cloudevent(deployment: Deployment) -> None:
    (written,) = await deployment.write(
        NewOutboxEvent(
            topic="orders", key="o-7", payload={"n": 1}, headers={"x-event-name": "order.paid", "x-own": "ü"}
        )
    )
    async with deployment.relay():
        await until(lambda: deployment.all_have_status(OutboxStatus.SENT))
    (message,) = deployment.broker.messages("orders")
    assert (message.key, message.message_id) == ("o-7", written)
    (event,) = await deployment.events()
    document = msgspec.json.decode(message.body or b"")
    timestamp = document.pop("time")
    assert timestamp.endswith("Z")
    assert timestamp[:10] == msgspec.json.decode(msgspec.json.encode(timestamp))[:10]
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


async def test_an_event_of_bytes_without_a_key(make_deployment: MakeDeployment) -> None:
    deployment: Deployment = await make_deployment(outbox_source="shop", namespace="")
    await deployment.write(NewOutboxEvent(topic="files", payload=b"\x00\xff", headers={"content-type": "image/png"}))
    async with deployment.relay():
        await until(lambda: deployment.all_have_status(OutboxStatus.SENT))
    (message,) = deployment.broker.messages("files")
    document = msgspec.json.decode(message.body or b"")
    assert (document["data_base64"], document["datacontenttype"]) == ("AP8=", "image/png")
    assert (document["source"], document["type"]) == ("shop", "files")
    assert "subject" not in document
    assert "data" not in document
    assert "holdfast-encoding" not in message.headers


async def test_plain_envelopes(make_deployment: MakeDeployment) -> None:
    deployment: Deployment = await make_deployment(outbox_envelope="plain")
    await deployment.write(NewOutboxEvent(topic="t", payload={"n": 1}), NewOutboxEvent(topic="t", payload=b"raw"))
    async with deployment.relay():
        await until(lambda: deployment.all_have_status(OutboxStatus.SENT))
    kinds = {message.body: message.headers["content-type"] for message in deployment.broker.messages("t")}
    assert kinds == {b'{"n":1}': "application/json", b"raw": "application/octet-stream"}
    assert all(message.headers["x-event-name"] == "t" for message in deployment.broker.messages("t"))


async def test_order_per_key_over_many_batches(make_deployment: MakeDeployment) -> None:
    deployment: Deployment = await make_deployment(outbox_batch=20)
    await deployment.write(*orders(12, 25))
    async with deployment.relay() as relay:
        await until(lambda: deployment.all_have_status(OutboxStatus.SENT))
        # Events written while it runs are found at once, not at the next poll.
        await deployment.write(NewOutboxEvent(topic="late", payload=1))
        await until(lambda: len(deployment.broker.messages("late")) == 1)
    check_order(deployment.bodies(), 12, 25)
    numbers = relay.numbers
    assert sum(numbers.success.buckets) == sum(numbers.delay.buckets) == 301
    assert sum(numbers.failure.buckets) + sum(numbers.dead.buckets) == 0


# Failures --------------------------------------------------------------------------------------------


async def test_a_failing_key_delays_only_itself(deployment: Deployment) -> None:
    attempts_made: list[int] = []

    def refuse(message: OutgoingMessage) -> bool:
        if message.key != "key-1":
            return False
        attempts_made.append(1)
        return len(attempts_made) < 4

    deployment.broker.refuse = refuse
    await deployment.write(*orders(3, 4))
    async with deployment.relay() as relay:
        await until(lambda: deployment.all_have_status(OutboxStatus.SENT))
    check_order(deployment.bodies(), 3, 4)
    first, *later = await deployment.events(key="key-1")
    assert (first.attempt_count, first.last_error) == (3, "")
    assert {event.attempt_count for event in later} == {0}, "events behind it were not attempted"
    assert sum(relay.numbers.failure.buckets) == 3


async def test_an_event_is_dead_after_the_limit_and_can_be_retried(make_deployment: MakeDeployment) -> None:
    deployment: Deployment = await make_deployment(outbox_max_attempts=2)
    deployment.broker.down = True
    (written,) = await deployment.write(NewOutboxEvent(topic="orders", key="k", payload={"n": 1}))
    async with deployment.relay() as relay:
        await until(lambda: deployment.all_have_status(OutboxStatus.RETRYING))
        (event,) = await deployment.events()
        assert (event.attempt_count, event.sent_at_ms) == (1, None)
        assert event.next_retry_at_ms is not None
        await until(lambda: deployment.all_have_status(OutboxStatus.DEAD))
        (event,) = await deployment.events()
        assert (event.attempt_count, event.next_retry_at_ms) == (2, None)
        assert "down" in event.last_error
        deployment.broker.down = False
        store = await deployment.store()
        assert await store.retry_events(None, [written], "ann", "it has recovered") == 1
        await until(lambda: deployment.all_have_status(OutboxStatus.SENT))
    assert [message.message_id for message in deployment.broker.messages("orders")] == [written]
    numbers = relay.numbers
    assert [sum(kind.buckets) for kind in (numbers.success, numbers.failure, numbers.dead)] == [1, 1, 1]


@pytest.mark.parametrize("blocks", [True, False])
async def test_a_dead_event_blocks_its_key_if_configured(make_deployment: MakeDeployment, blocks: bool) -> None:
    deployment: Deployment = await make_deployment(outbox_max_attempts=1, outbox_dead_blocks=blocks)
    deployment.broker.refuse = lambda message: b'"n":0' in (message.body or b"")
    await deployment.write(*orders(1, 3))
    await deployment.write(NewOutboxEvent(topic="orders", key="other", payload={"n": 9}))
    async with deployment.relay():
        await until(lambda: any(body["n"] == 9 for body in deployment.bodies()))
        if blocks:
            await deployment.write(NewOutboxEvent(topic="orders", key="third", payload={"n": 10}))
            await until(lambda: any(body["n"] == 10 for body in deployment.bodies()))
            await until(lambda: has_statuses(deployment, ["DEAD", "NEW", "NEW", "SENT", "SENT"]))
            deployment.broker.refuse = lambda _: False
            store = await deployment.store()
            assert await store.retry_events(None, [(await deployment.events())[0].id], "ann", "") == 1
            await until(lambda: deployment.all_have_status(OutboxStatus.SENT))
            assert [body["n"] for body in deployment.bodies() if "key" in body] == [0, 1, 2]
        else:
            await until(lambda: len(deployment.bodies()) == 3)
            await until(lambda: has_statuses(deployment, ["DEAD", "SENT", "SENT", "SENT"]))


async def has_statuses(deployment: Deployment, expected: list[str]) -> bool:
    return await deployment.statuses() == expected


async def test_an_unreachable_broker_does_not_delay_other_destinations(
    make_deployment: MakeDeployment, namespace: str
) -> None:
    other = f"{namespace}-other"
    targets = {
        "default": {"type": "memory", "connection": {"name": namespace}},
        "other": {"type": "memory", "connection": {"name": other}},
    }
    deployment: Deployment = await make_deployment(outbox_targets=targets)
    deployment.broker.down = True
    await deployment.write(*orders(5, 2))
    await deployment.write(*[NewOutboxEvent(topic="orders", key="k", payload=n, destination="other") for n in range(5)])
    try:
        async with deployment.relay():
            await until(lambda: len(MemoryBroker.named(other).messages("orders")) == 5)
            await until(lambda: has_retrying(deployment, 5))
            assert deployment.bodies() == []
            deployment.broker.down = False
            await until(lambda: deployment.all_have_status(OutboxStatus.SENT))
    finally:
        MemoryBroker.reset(other)
    check_order(deployment.bodies(), 5, 2)


async def has_retrying(deployment: Deployment, at_least: int) -> bool:
    return len(await deployment.events(status=OutboxStatus.RETRYING)) >= at_least


async def test_events_of_an_unknown_destination_are_logged_and_left_to_other_relays(
    make_deployment: MakeDeployment, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    deployment, other = await make_deployment(), await make_deployment()
    targets = {"mars": {"type": "memory", "connection": {"name": namespace}}}
    serving = other.app.settings.model_copy(update={"outbox_targets": outbox_targets(targets)})
    async with deployment.relay():
        await deployment.write(NewOutboxEvent(topic="orders", payload=1, destination="mars"))
        await until(lambda: "'mars'" in caplog.text)
        assert "serves default" in caplog.text
        (event,) = await deployment.events()
        assert (event.status, event.attempt_count) == (OutboxStatus.NEW, 0)
        async with other.relay(serving):
            await until(lambda: deployment.all_have_status(OutboxStatus.SENT))
    assert deployment.bodies() == [1]


def outbox_targets(targets: dict[str, Any]) -> Any:
    return Settings(url="sqlite://", outbox_targets=targets).outbox_targets


class CountingStore:
    """Wraps a store and counts calls by method."""

    def __init__(self, store: OutboxStore) -> None:
        self._store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._store, name)


async def test_lanes_of_another_relay_are_not_polled_continuously(deployment: Deployment) -> None:
    await deployment.write(NewOutboxEvent(topic="orders", key="k", payload=1))
    (event,) = await deployment.events()
    store = await deployment.store()
    lanes = await store.acquire_lanes("another", ["default"], 64, 60_000)
    result = PublishResult(
        tenant_id=event.tenant_id, id=event.id, status=OutboxStatus.RETRYING, attempt_count=1, next_retry_at_ms=1
    )
    assert await store.record_results("another", lanes, [result])
    counting: Any = CountingStore(store)
    relay = Relay(counting, build_destinations(deployment.app.settings, None), deployment.app.settings, Counters())
    running = asyncio.create_task(relay.run())
    await asyncio.sleep(1.5)
    assert 0 < counting.calls["acquire_lanes"] < 25, counting.calls
    await store.release_lanes("another")
    await until(lambda: deployment.all_have_status(OutboxStatus.SENT))
    relay.stop()
    await running


async def test_a_failed_flight_is_not_retried_at_once(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    await deployment.write(NewOutboxEvent(topic="orders", key="k", payload=1))
    store = await deployment.store()
    attempts_made: list[float] = []

    async def due_events(*_: Any, **__: Any) -> Any:
        attempts_made.append(time.monotonic())
        raise RuntimeError("a row that cannot be read")

    monkeypatch.setattr(store, "due_events", due_events)
    async with deployment.relay():
        await asyncio.sleep(2)
    assert len(attempts_made) < 12, len(attempts_made)
    monkeypatch.undo()
    async with deployment.relay():
        await until(lambda: deployment.all_have_status(OutboxStatus.SENT))


async def test_unreadable_rows_do_not_stop_others(deployment: Deployment) -> None:
    await deployment.write(*[NewOutboxEvent(topic="orders", payload=number) for number in range(4)])
    _, deep, odd, _ = await deployment.events()
    async with transaction(deployment.url) as connection:
        await connection.execute("UPDATE outbox_events SET lane = 7")
        await connection.execute(f"UPDATE outbox_events SET payload = '{'[' * 20_000}' WHERE id = '{deep.id}'")
        late = "9223372036854775" if deployment.url.startswith("sqlite:") else "'infinity'"
        await connection.execute(f"UPDATE outbox_events SET created_at = {late} WHERE id = '{odd.id}'")
    async with deployment.relay():
        await until(lambda: len(deployment.bodies()) >= 2 and deployment.bodies()[-1] == 3)
    store = await deployment.store()
    stored = await store.get("default", deep.id)
    assert stored is not None
    assert stored.status is OutboxStatus.DEAD


class SlowDestination(Destination):
    """Waits before it answers, and records the batches that it receives."""

    def __init__(self, seconds: float = 0.0, answer: Answer | None = None) -> None:
        self.seconds = seconds
        self.answer = answer or Published()
        self.batches: list[list[str]] = []
        self.started = asyncio.Event()
        self.closed = False

    async def send(self, events: Sequence[OutboxEvent], timeout_s: float) -> list[Answer]:
        self.batches.append([event.id for event in events])
        self.started.set()
        await asyncio.sleep(self.seconds)
        return [self.answer for _ in events]

    async def close(self) -> None:
        self.closed = True


async def test_errors_are_truncated_and_redacted(deployment: Deployment) -> None:
    await deployment.write(NewOutboxEvent(topic="t", payload=1))
    failing = SlowDestination(answer=PublishFailed("amqp://app:s3cret@host/ refused, password=hunter2 " + "x " * 5_000))
    async with deployment.relay(default=failing):
        await until(lambda: deployment.all_have_status(OutboxStatus.RETRYING))
    (event,) = await deployment.events()
    assert "s3cret" not in event.last_error
    assert "hunter2" not in event.last_error
    assert len(event.last_error) <= 1_000


def failed_event(attempts: int) -> OutboxEvent:
    """Return an event with this number of failed attempts."""
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
        (result,) = publish_results([failed_event(attempts)], [PublishFailed("x")], settings, 0)
        assert (result.status, result.attempt_count) == (OutboxStatus.RETRYING, attempts + 1)
        waits.append(result.next_retry_at_ms)
    assert waits == [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000, 256_000]
    (result,) = publish_results([failed_event(9)], [PublishFailed("x")], settings, 0)
    assert (result.status, result.attempt_count, result.next_retry_at_ms) == (OutboxStatus.DEAD, 10, None)
    long = settings.model_copy(update={"outbox_max_attempts": 99})
    (result,) = publish_results([failed_event(60)], [PublishFailed("x")], long, 0)
    assert result.next_retry_at_ms == 600_000


def test_permanent_failures_are_dead_at_once_and_outages_never() -> None:
    settings = Settings(url="sqlite://")
    (dead,) = publish_results([failed_event(0)], [PublishFailed("x", permanent=True)], settings, 0)
    (alive,) = publish_results([failed_event(500)], [PublishFailed("x", outage=True)], settings, 0)
    assert (dead.status, alive.status, alive.next_retry_at_ms) == (OutboxStatus.DEAD, OutboxStatus.RETRYING, 30_000)


def test_invalid_targets_are_refused_at_start() -> None:
    for target, message in (
        ({"type": "carrier-pigeon"}, "carrier-pigeon"),
        ({"type": "memory", "connection": {"password": "hunter2"}}, "password"),
    ):
        settings = Settings.load(url="sqlite://", outbox_targets={"default": target})
        with pytest.raises(InvalidOption, match=message) as caught:
            build_destinations(settings, None)
        assert "outbox_targets.default" in str(caught.value)
        assert "hunter2" not in str(caught.value)
    with pytest.raises(InvalidOption, match="transactional enqueue"):
        Settings.load(url="sqlite://", outbox_targets={"holdfast": {"type": "memory"}})


# Several relays, and killed relays -----------------------------------------------------------------


class KilledRelayStore:
    """The store of a relay that is killed before it records results."""

    def __init__(self, store: OutboxStore) -> None:
        self._store = store
        self.reached = asyncio.Event()
        self._never = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def record_results(self, relay: str, lanes: Sequence[int], results: Sequence[PublishResult]) -> bool:
        self.reached.set()
        await self._never.wait()
        return False

    async def release_lanes(self, relay: str, lanes: Sequence[int] | None = None) -> None:
        """A killed relay does not release its lanes."""


async def test_a_relay_killed_between_publish_and_record(make_deployment: MakeDeployment) -> None:
    deployment: Deployment = await make_deployment(outbox_lease_s=1.0)
    await deployment.write(*orders(4, 6))
    store: Any = KilledRelayStore(await deployment.store())
    victim = Relay(store, build_destinations(deployment.app.settings, None), deployment.app.settings, Counters())
    running = asyncio.create_task(victim.run())
    await store.reached.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    published = len(deployment.bodies())
    assert published > 0
    assert await deployment.all_have_status(OutboxStatus.NEW)
    async with deployment.relay():
        await until(lambda: deployment.all_have_status(OutboxStatus.SENT))
    check_order(deployment.bodies(), 4, 6, repeats=True)
    messages = deployment.broker.messages("orders")
    ids = [message.message_id for message in messages]
    assert len(ids) == 24 + published
    # Each publication of an event has the same id.
    assert len(set(ids)) == 24
    assert {message.message_id for message in messages[:published]} <= {m.message_id for m in messages[published:]}


class ExpiredLeaseStore:
    """The store of a relay that acquires lanes once and cannot renew their leases."""

    def __init__(self, store: OutboxStore) -> None:
        self._store = store
        self._acquired = False
        self.results: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def acquire_lanes(self, *args: Any, **kwargs: Any) -> list[int]:
        lanes = [] if self._acquired else await self._store.acquire_lanes(*args, **kwargs)
        self._acquired = self._acquired or bool(lanes)
        return lanes

    async def record_results(self, *args: Any) -> bool:
        self.results.append(await self._store.record_results(*args))
        return self.results[-1]


@pytest.mark.parametrize("relay_notices", [True, False])
async def test_results_for_lost_lanes_are_not_recorded(
    make_deployment: MakeDeployment, monkeypatch: pytest.MonkeyPatch, relay_notices: bool
) -> None:
    deployment: Deployment = await make_deployment(outbox_lease_s=1.0)
    store: Any = ExpiredLeaseStore(await deployment.store())
    (written,) = await deployment.write(NewOutboxEvent(topic="orders", key="k", payload={"key": 0, "n": 0}))
    slow = SlowDestination(seconds=1.5, answer=PublishFailed("late"))
    stalled = Relay(store, {"default": slow}, deployment.app.settings, Counters())
    if not relay_notices:
        # The relay's clock does not show the expiry: then the store refuses the results.
        monkeypatch.setattr(stalled._lanes, "remaining_s", lambda _: 1.0)
    running = asyncio.create_task(stalled.run())
    await slow.started.wait()
    # Its lease expires while it waits for the broker.
    async with deployment.relay():
        await until(lambda: deployment.all_have_status(OutboxStatus.SENT))
        await until(lambda: not stalled._loops[0]._flights)
    stalled.stop()
    await running
    (event,) = await deployment.events()
    assert (event.status, event.attempt_count) == (OutboxStatus.SENT, 0), "a relay without the lanes records nothing"
    assert slow.batches == [[written]]
    assert store.results == ([] if relay_notices else [False])


async def test_a_running_relay_keeps_its_lanes(make_deployment: MakeDeployment) -> None:
    deployment: Deployment = await make_deployment(outbox_lease_s=2.0)
    (written,) = await deployment.write(NewOutboxEvent(topic="orders", key="k", payload=1))
    slow = SlowDestination(seconds=2.5)
    async with deployment.relay(default=slow):
        await slow.started.wait()
        async with deployment.relay():
            await until(lambda: deployment.all_have_status(OutboxStatus.SENT))
    assert slow.batches == [[written]]
    assert deployment.broker.messages("orders") == []


class SlowReadStore(ExpiredLeaseStore):
    """Also delays reads."""

    def __init__(self, store: OutboxStore, seconds: float) -> None:
        super().__init__(store)
        self._seconds = seconds
        self.read = 0

    async def due_events(self, *args: Any, **kwargs: Any) -> list[OutboxEvent]:
        events = await self._store.due_events(*args, **kwargs)
        await asyncio.sleep(self._seconds)
        self.read += len(events)
        return events


async def test_events_that_may_outlast_the_lease_are_not_sent(make_deployment: MakeDeployment) -> None:
    deployment: Deployment = await make_deployment(outbox_lease_s=1.0)
    await deployment.write(NewOutboxEvent(topic="t", payload=1))
    for seconds, batches in ((0.7, 0), (0.0, 1)):
        store: Any = SlowReadStore(await deployment.store(), seconds)
        slow = SlowDestination()
        relay = Relay(store, {"default": slow}, deployment.app.settings, Counters())
        running = asyncio.create_task(relay.run())
        await until(lambda store=store, relay=relay: bool(store.read) and not relay._loops[0]._flights)
        relay.stop()
        await running
        assert len(slow.batches) == batches
    assert await deployment.statuses() == ["SENT"]


async def test_three_relays_publish_each_event_once(make_deployment: MakeDeployment) -> None:
    deployment: Deployment = await make_deployment(outbox_batch=25)
    others = [await make_deployment(outbox_batch=25) for _ in range(2)]
    await deployment.write(*orders(40, 15))
    async with deployment.relay() as one, others[0].relay() as two, others[1].relay() as three:
        await until(lambda: deployment.all_have_status(OutboxStatus.SENT), 30)
    check_order(deployment.bodies(), 40, 15)
    counts = [sum(relay.numbers.success.buckets) for relay in (one, two, three)]
    assert sum(counts) == 600


async def test_stopping_finishes_events_in_flight(deployment: Deployment) -> None:
    await deployment.write(NewOutboxEvent(topic="t", payload=1))
    slow = SlowDestination(seconds=0.3)
    async with deployment.relay(default=slow) as relay:
        await slow.started.wait()
        relay.stop()
    assert await deployment.statuses() == ["SENT"]
    assert slow.closed
    # Its lanes are released at once.
    await deployment.write(NewOutboxEvent(topic="orders", payload={"n": 1}))
    async with deployment.relay():
        await until(lambda: deployment.all_have_status(OutboxStatus.SENT), 5)


async def test_sent_events_are_deleted_after_the_retention_period(make_deployment: MakeDeployment) -> None:
    deployment: Deployment = await make_deployment(outbox_retention_s=0.001)
    await deployment.write(*orders(2, 2))
    async with deployment.relay():
        await until(lambda: len(deployment.bodies()) == 4)
        await until(lambda: deployment.all_have_status(OutboxStatus.SENT))
    async with deployment.relay():
        await until(lambda: is_empty(deployment))


async def is_empty(deployment: Deployment) -> bool:
    return not await deployment.events()
