"""Dead letters of triggers are replayed to their queue, on every broker."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from holdfast.brokers.factory import build_adapter, build_publisher, dead_letter_queue
from holdfast.brokers.memory import MemoryBroker, MockQueueAdapter
from holdfast.brokers.port import OutgoingMessage, QueueAdapter, RawMessage
from holdfast.errors import InvalidOption
from holdfast.triggers.config import TriggerEntry
from holdfast.triggers.replay import REPLAY_ID, replay_dead_letters
from tests.brokers.rabbitmq_server import PASSWORD, USER
from tests.brokers.sqs_server import ACCESS_KEY, REGION, SECRET_KEY
from tests.triggers.rig import Recorder, Rig, until

ORIGINALS: Sequence[tuple[bytes | None, dict[str, str], str]] = (
    (b'{"n": 1}', {"x-event-name": "order.placed", "x-own": "kept"}, "k-1"),
    (bytes(range(256)), {}, ""),
    (b"", {"x-dedup-key": "three"}, "k-1"),
)


def entry_of(kind: str, connection: dict[str, Any], queue: str, **options: Any) -> TriggerEntry:
    fields = {"queue_name": queue, "consumer_group": "shop", "runtime": {"task": "ship"}} | options
    return TriggerEntry.model_validate(fields | {"adapter": {"type": kind, "connection": connection}})


def with_unsuitable_settings(entry: TriggerEntry) -> TriggerEntry:
    """Return the entry with settings that suit a trigger or a publisher, but not a replay."""
    odd: dict[str, Any] = {"kafka": {"start_at": "latest"}, "rabbitmq": {"exchange": "amq.topic"}}
    changed = entry.adapter.connection.model_copy(update=odd.get(entry.adapter.type, {}))
    return entry.model_copy(update={"adapter": entry.adapter.model_copy(update={"connection": changed})})


_BROKERS: Final = ("rabbitmq", "sqs", "sqs.fifo", "kafka")


@pytest.fixture(params=["memory", "redis", *(pytest.param(kind, marks=pytest.mark.brokers) for kind in _BROKERS)])
async def entry(request: pytest.FixtureRequest) -> TriggerEntry:
    """A trigger on an existing, empty queue."""
    kind, queue = request.param, f"orders-{secrets.token_hex(6)}"
    if kind == "memory":
        return entry_of(kind, {"name": queue}, queue)
    if kind == "redis":
        return entry_of(kind, {"url": request.getfixturevalue("redis_url")}, queue)
    if kind == "rabbitmq":
        server = request.getfixturevalue("rabbitmq_server")
        connection = {"host": "127.0.0.1", "port": server.port, "user": USER, "password": PASSWORD}
        return entry_of(kind, connection, queue)
    if kind == "kafka":
        server = request.getfixturevalue("kafka_server")
        admin = AdminClient({"bootstrap.servers": server.address})
        for name in (queue, f"{queue}.dlq"):
            await asyncio.to_thread(admin.create_topics([NewTopic(name, 2, 1)])[name].result)
        return entry_of(kind, {"bootstrap_servers": server.address, "session_timeout_s": 6.0}, queue)
    server = request.getfixturevalue("sqs_server")
    connection = {
        "endpoint_url": f"http://127.0.0.1:{server.port}",
        "region": REGION,
        "access_key": ACCESS_KEY,
        "secret_key": SECRET_KEY,
        "wait_time_s": 0,
        "declare": True,
    }
    return entry_of("sqs", connection, queue + kind.removeprefix("sqs"))


def adapter_of(entry: TriggerEntry) -> QueueAdapter:
    return build_adapter(entry.adapter.type, entry.adapter.connection, entry.queue_name, entry.consumer_group)


async def publish(entry: TriggerEntry, *messages: OutgoingMessage) -> None:
    publisher = build_publisher(entry.adapter.type, entry.adapter.connection)
    await publisher.connect()
    assert await publisher.publish(messages) == [None] * len(messages)
    await publisher.close()


async def take(adapter: QueueAdapter, count: int) -> AsyncIterator[RawMessage]:
    if count:
        async with asyncio.timeout(60):
            async for message in adapter.consume():
                yield message
                count -= 1
                if not count:
                    return


async def test_dead_letters_are_replayed_unchanged(entry: TriggerEntry) -> None:
    originals = [*ORIGINALS, (None, {}, "k-2")] if entry.adapter.type in ("kafka", "memory") else [*ORIGINALS]
    adapter = adapter_of(entry)
    await adapter.connect()
    await publish(
        entry,
        *(
            OutgoingMessage(entry.queue_name, body, headers, key, f"event-{number}")
            for number, (body, headers, key) in enumerate(originals)
        ),
    )
    ids = set()
    async for message in take(adapter, len(originals)):
        ids.add(message.message_id)
        await adapter.send_to_dlq(message, "not wanted", ["try 1: no"])
    odd = with_unsuitable_settings(entry)
    dry_report = await replay_dead_letters(odd, dry_run=True)
    assert (dry_report.matched, dry_report.results) == (len(originals), [])
    first = await replay_dead_letters(odd, limit=1, rate_per_s=1_000)
    rest = await replay_dead_letters(odd, rate_per_s=1_000)
    assert (first.done, rest.done, first.failed + rest.failed) == (1, len(originals) - 1, 0)
    assert {result.id for result in [*first.results, *rest.results]} == ids
    replayed = []
    async for message in take(adapter, len(originals)):
        headers = dict(message.headers)
        assert headers.pop("x-replay-of") in ids
        assert headers.pop(REPLAY_ID)
        assert message.message_id not in ids
        # RabbitMQ keeps the key in a header.
        headers.pop("x-key", None)
        replayed.append((message.body, headers, message.key))
        await adapter.ack(message)
    assert sorted(replayed, key=repr) == sorted(originals, key=repr)
    assert (await replay_dead_letters(odd)).results == []
    await adapter.close()


async def test_a_limit_below_one_and_a_rate_of_zero_are_refused() -> None:
    with pytest.raises(InvalidOption, match="at least 1"):
        await replay_dead_letters(entry_of("memory", {}, "orders"), limit=0)
    with pytest.raises(InvalidOption, match="greater than 0"):
        await replay_dead_letters(entry_of("memory", {}, "orders"), rate_per_s=0)


def test_dead_letter_queues_have_the_names_that_adapters_use() -> None:
    assert dead_letter_queue("kafka", "orders") == "orders.dlq"
    assert dead_letter_queue("sqs", "orders.fifo") == "orders-dlq.fifo"
    assert dead_letter_queue("redis", "orders", "dead-orders") == "dead-orders"


# With a running trigger ------------------------------------------------------------------------------------


def rig_entry(rig: Rig, **options: Any) -> TriggerEntry:
    name = next(name for name, broker in MemoryBroker._named.items() if broker is rig.broker)
    return entry_of("memory", {"name": name}, rig.config.queue_name, **options)


class FailingRuntime(Recorder):
    """Fails until `succeeds` is set."""

    def __init__(self) -> None:
        super().__init__(self._run)
        self.succeeds = False

    def _run(self, _: Any) -> str:
        if not self.succeeds:
            raise RuntimeError("not yet")
        return "run"


async def test_a_repeat_of_a_replay_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed between the broker's confirmation and the acknowledgement of the dead letter."""
    runtime = FailingRuntime()
    rig = Rig(runtime, max_retries=0)
    first_id = rig.write({"n": 1})
    async with rig.trigger:
        await rig.wait_handled(1)
        assert len(rig.dead_letters) == 1
        runtime.succeeds = True
        with monkeypatch.context() as patch:

            async def cancel(*_: object) -> None:
                raise asyncio.CancelledError

            patch.setattr(MockQueueAdapter, "ack", cancel)
            with pytest.raises(asyncio.CancelledError):
                await replay_dead_letters(rig_entry(rig))
            await until(lambda: len(rig.broker.messages(rig.config.queue_name)) == 2)
        assert (await replay_dead_letters(rig_entry(rig))).done == 1
        await rig.wait_handled(3)
    assert [context["headers"].get("x-replay-of") for _, context, _, _ in runtime.calls] == [None, first_id]
    assert rig.counts.dedup_hits == 1
    assert (await replay_dead_letters(rig_entry(rig))).results == []


async def test_a_replayed_message_that_fails_is_a_dead_letter_again() -> None:
    runtime = FailingRuntime()
    rig = Rig(runtime, max_retries=0)
    first_id = rig.write({"n": 1})
    async with rig.trigger:
        await rig.wait_handled(1)
        report = await replay_dead_letters(rig_entry(rig))
        await rig.wait_handled(2)
        assert report.done == 1
        assert len(rig.dead_letters) == 2
        assert (await replay_dead_letters(rig_entry(rig), dry_run=True)).matched == 1
        runtime.succeeds = True
        (result,) = (await replay_dead_letters(rig_entry(rig))).results
        assert (result.id, result.done) == (first_id, True)
        await rig.wait_handled(3)
    assert len(runtime.calls) == 3


async def test_new_dead_letters_during_a_replay_are_not_replayed_again() -> None:
    rig = Rig(FailingRuntime(), max_retries=0)
    for number in range(3):
        rig.write({"n": number})
    async with rig.trigger:
        await rig.wait_handled(3)
        # Slow enough that the first ones are dead letters again before the last one is replayed.
        report = await replay_dead_letters(rig_entry(rig), rate_per_s=5)
        assert [result.code for result in report.results if not result.done] == ["FAILED_AGAIN"] * report.failed
        assert report.done == 3
        assert report.failed > 0
        await rig.wait_handled(6)
    assert (await replay_dead_letters(rig_entry(rig), dry_run=True)).matched == 3


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_dead_letters_of_another_queue_are_not_replayed(kind: str, request: pytest.FixtureRequest) -> None:
    name = secrets.token_hex(6)
    connection = {"name": name} if kind == "memory" else {"url": request.getfixturevalue("redis_url")}
    dlq = f"dead-{name}"
    mine, other = (entry_of(kind, connection, f"{queue}-{name}", dlq_name=dlq) for queue in ("mine", "other"))
    dead = {"x-dead-reason": "no", "x-dead-message-id": "1"}
    await publish(
        mine,
        *(OutgoingMessage(dlq, b"1", {**dead, "x-dead-source": entry.queue_name}, "") for entry in (other, mine)),
    )
    for entry in (mine, other):
        report = await replay_dead_letters(entry)
        assert (report.done, report.failed) == (1, 0)
        adapter = adapter_of(entry)
        await adapter.connect()
        async for message in take(adapter, 1):
            assert (message.headers["x-replay-of"], message.body) == ("1", b"1")
        await adapter.close()


async def test_too_many_dead_letters_of_another_queue_in_front_are_reported(redis_url: str) -> None:
    name = secrets.token_hex(6)
    dlq = f"dead-{name}"
    mine = entry_of("redis", {"url": redis_url}, f"mine-{name}", dlq_name=dlq)
    foreign = OutgoingMessage(dlq, b"1", {"x-dead-source": "other"}, "")
    await publish(mine, foreign, foreign, OutgoingMessage(dlq, b"2", {"x-dead-source": mine.queue_name}, ""))
    report = await replay_dead_letters(mine, limit=2)
    assert (report.results, report.stopped[:31]) == ([], "2 dead letters of other queues,")
    assert (await replay_dead_letters(mine, limit=3)).done == 1
