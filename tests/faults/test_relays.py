"""Relays on real brokers and PostgreSQL: killed relays and brokers, wrong passwords, DEAD events."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aio_pika
import msgspec
import pytest

from tests.brokers.kafka_server import SASL_USER, KafkaServer, MakeKafka
from tests.brokers.rabbitmq_server import PASSWORD, USER, RabbitServer
from tests.faults.broker_support import KILLED_BEFORE_RECORDING, Processes, Topic, count_statuses, fill_outbox
from tests.faults.support import eventually

pytestmark = [pytest.mark.faults, pytest.mark.postgres]

SECRET = "not-the-password-7"
BATCH = 500
#: Batches that a relay may have published without recording the results.
FLIGHTS = 3


@pytest.fixture
def processes(tmp_path: Path, postgres_url: str, redis_url: str, namespace: str) -> Iterator[Processes]:
    processes = Processes(
        tmp_path,
        HOLDFAST_URL=redis_url,
        HOLDFAST_NAMESPACE=namespace,
        HOLDFAST_OUTBOX_URL=postgres_url,
        HOLDFAST_OUTBOX_LEASE_S="12",
        HOLDFAST_OUTBOX_BACKOFF_BASE_S="0.1",
        HOLDFAST_OUTBOX_BACKOFF_MAX_S="1",
        HOLDFAST_OUTBOX_MAX_ATTEMPTS="1000",
    )
    yield processes
    processes.clean_up()


def targets(kind: str, connection: Mapping[str, Any]) -> str:
    return json.dumps({"default": {"type": kind, "connection": connection}})


def kafka_targets(server: KafkaServer) -> str:
    return targets("kafka", {"bootstrap_servers": server.address, "publish_timeout_s": 5})


def check_arrived(messages: Iterable[tuple[int, Any]], written: Mapping[str, tuple[str, int]]) -> int:
    """Check that all events arrived with their ids and in order per key, with at most one restart of each key.

    Return the number of repeated messages.
    """
    ids = Counter[str]()
    numbers: dict[str, list[int]] = {}
    partitions: dict[str, int] = {}
    for partition, message in messages:
        headers = {name: value.decode() for name, value in message.headers()}
        document = msgspec.json.decode(message.value())
        event_id, key, n = document["id"], document["data"]["key"], document["data"]["n"]
        assert (headers["x-dedup-key"], message.key().decode()) == (event_id, key)
        assert written[event_id] == (key, n), "an event changed its id"
        assert partitions.setdefault(key, partition) == partition
        ids[event_id] += 1
        numbers.setdefault(key, []).append(n)
    assert ids.keys() == written.keys(), "events were lost"
    for key, received in numbers.items():
        assert list(dict.fromkeys(received)) == sorted(set(received)), f"{key}: {received}"
        restarts = [index for index in range(1, len(received)) if received[index] != received[index - 1] + 1]
        assert len(restarts) <= 1, f"{key} was restarted {len(restarts)} times: {received}"
        # After a restart all later events are repeated in order.
        assert all(received[index] <= received[index - 1] for index in restarts), f"{key}: {received}"
    return sum(ids.values()) - len(ids)


@pytest.mark.slow
async def test_killing_one_of_three_relays_loses_nothing(
    kafka_server: KafkaServer, processes: Processes, postgres_url: str, namespace: str
) -> None:
    """100,000 events of 1,000 keys: all are SENT and published in order per key; only those in flight in the killed
    relay are repeated."""
    topic = Topic(kafka_server, namespace, 4)
    victim, *others = [
        processes.start("outbox", "relay", HOLDFAST_OUTBOX_TARGETS=kafka_targets(kafka_server)) for _ in range(3)
    ]
    for relay in (victim, *others):
        await relay.wait_for_log("relay started")
    written = await fill_outbox(postgres_url, topic.name, 1_000, 100)

    async def sent(at_least: int) -> bool:
        return (await count_statuses(postgres_url)).get("SENT", 0) >= at_least

    await eventually(lambda: sent(15_000), "a first part", 120)
    victim.kill()
    assert not await sent(len(written)), "all events were sent before the kill"
    await eventually(lambda: sent(len(written)), "the rest", 150)
    assert await count_statuses(postgres_url) == {"SENT": len(written)}
    for relay in others:
        relay.terminate()
    for relay in others:
        assert await relay.wait_ended() == 0
    assert check_arrived(topic.read(), written) <= FLIGHTS * BATCH


async def test_a_relay_killed_between_publish_and_record_repeats_its_events(
    kafka_server: KafkaServer, processes: Processes, postgres_url: str, namespace: str
) -> None:
    """Events published without a recorded result are published again with the same ids, in the same order."""
    topic = Topic(kafka_server, namespace, 2)
    variables = {"HOLDFAST_OUTBOX_TARGETS": kafka_targets(kafka_server), "HOLDFAST_OUTBOX_BATCH": "100"}
    written = await fill_outbox(postgres_url, topic.name, 50, 40)
    # No other relay runs meanwhile, so a shorter lease is safe and its expiry is awaited for less time.
    victim = processes.start(
        "outbox", "relay", program=("-c", KILLED_BEFORE_RECORDING), **variables, HOLDFAST_OUTBOX_LEASE_S="5"
    )
    assert await victim.wait_ended() == -signal.SIGKILL
    recorded, published = await count_statuses(postgres_url), len(topic.read())
    assert recorded == {"SENT": 200, "NEW": 1_800}
    assert published >= 300, "not more was published than recorded"
    processes.start("outbox", "relay", **variables)

    async def all_sent() -> bool:
        return await count_statuses(postgres_url) == {"SENT": len(written)}

    await eventually(all_sent, "the rest", 60)
    repeated = check_arrived(topic.read(), written)
    assert repeated == published - 200


async def test_a_broker_killed_during_a_batch_loses_nothing(
    make_kafka: MakeKafka, processes: Processes, postgres_url: str
) -> None:
    """The relay recovers by itself; nothing is lost, and the order per key is kept."""
    server = make_kafka()
    topic = Topic(server, "orders", 2)
    relay = processes.start(
        "outbox", "relay", HOLDFAST_OUTBOX_TARGETS=kafka_targets(server), HOLDFAST_OUTBOX_BATCH="50"
    )
    await relay.wait_for_log("relay started")
    written = await fill_outbox(postgres_url, topic.name, 100, 50)

    async def has_statuses(status: str, at_least: int) -> bool:
        return (await count_statuses(postgres_url)).get(status, 0) >= at_least

    await eventually(lambda: has_statuses("SENT", 500), "a first part", 60)
    server.kill()
    assert not await has_statuses("SENT", len(written)), "all events were sent before the kill"
    await eventually(lambda: has_statuses("RETRYING", 1), "the first failure", 60)
    server.start()
    await eventually(lambda: has_statuses("SENT", len(written)), "the rest", 90)
    assert relay.alive
    # One batch that the broker had written and not confirmed is repeated.
    assert check_arrived(topic.read(), written) <= 50


@pytest.mark.parametrize("kind", ["kafka", "rabbitmq"])
async def test_a_wrong_password_is_reported_and_never_shown(
    request: pytest.FixtureRequest, kind: str, processes: Processes, postgres_url: str, namespace: str
) -> None:
    server: Any = request.getfixturevalue(f"{kind}_server")
    if kind == "kafka":
        connection = {
            "bootstrap_servers": server.sasl_address,
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_username": SASL_USER,
            "sasl_password": SECRET,
        }
    else:
        connection = {"url": f"amqp://{USER}:{SECRET}@127.0.0.1:{server.port}/"}
    await fill_outbox(postgres_url, namespace, 3, 1)
    relay = processes.start(
        "outbox",
        "relay",
        "--log-level",
        "debug",
        HOLDFAST_OUTBOX_TARGETS=targets(kind, connection),
        HOLDFAST_OUTBOX_MAX_ATTEMPTS="2",
    )

    async def dead() -> bool:
        return await count_statuses(postgres_url) == {"DEAD": 3}

    await eventually(dead, "the limit of attempts", 60)
    listing = processes.start("outbox", "list", "--json")
    assert await listing.wait_ended() == 0
    relay.terminate()
    assert await relay.wait_ended() == 0
    output = relay.log.read_text() + listing.log.read_text()
    assert "events DEAD" in output
    assert SECRET not in output
    assert any(word in output for word in ("uthentication", "ACCESS_REFUSED", "refuse")), output


async def test_events_are_dead_after_the_limit_and_can_be_retried(
    rabbitmq_server: RabbitServer, processes: Processes, postgres_url: str, namespace: str
) -> None:
    """The queue is missing; once it exists, `holdfast outbox retry` publishes all events in order."""
    connection = {"host": "127.0.0.1", "port": rabbitmq_server.port, "user": USER, "password": PASSWORD}
    written = await fill_outbox(postgres_url, namespace, 2, 3)
    relay = processes.start(
        "outbox", "relay", HOLDFAST_OUTBOX_TARGETS=targets("rabbitmq", connection), HOLDFAST_OUTBOX_MAX_ATTEMPTS="2"
    )

    async def has_statuses(**expected: int) -> bool:
        return await count_statuses(postgres_url) == expected

    # The first event of each key; the others wait behind it.
    await eventually(lambda: has_statuses(DEAD=2, NEW=4), "the limit of attempts", 60)
    link = await aio_pika.connect(rabbitmq_server.url)
    async with link:
        channel = await link.channel()
        queue = await channel.declare_queue(namespace, durable=True, arguments={"x-queue-type": "quorum"})
        retry = processes.start("outbox", "retry", "--all-dead", "--reason", "the queue exists")
        assert await retry.wait_ended() == 0, retry.log.read_text()
        await eventually(lambda: has_statuses(SENT=6), "all to be sent", 60)
        received = [await queue.get(no_ack=True) for _ in range(6)]
        assert await queue.get(fail=False) is None
    assert relay.alive
    numbers: dict[str, list[int]] = {}
    for message in received:
        assert message is not None
        key, n = written[str(message.message_id)]
        numbers.setdefault(key, []).append(n)
    assert numbers == {"key-0": [0, 1, 2], "key-1": [0, 1, 2]}
