"""Relays on real brokers and a real PostgreSQL: relays and brokers that die in mid-batch, wrong passwords, DEAD."""

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
from tests.faults.broker_support import DIES_BEFORE_MARKING, Processes, Topic, fill_outbox, statuses
from tests.faults.support import eventually

pytestmark = [pytest.mark.faults, pytest.mark.postgres]

SECRET = "not-the-password-7"
BATCH = 500
#: Batches that a relay may have published and not marked.
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


def to_kafka(server: KafkaServer) -> str:
    return targets("kafka", {"bootstrap_servers": server.address, "publish_timeout_s": 5})


def check_arrived(messages: Iterable[tuple[int, Any]], written: Mapping[str, tuple[str, int]]) -> int:
    """All have arrived under their ids, of each key in order; one relay that died goes back once at most. How many
    came twice."""
    ids = Counter[str]()
    numbers: dict[str, list[int]] = {}
    places: dict[str, int] = {}
    for partition, message in messages:
        headers = {name: value.decode() for name, value in message.headers()}
        document = msgspec.json.decode(message.value())
        event_id, key, n = document["id"], document["data"]["key"], document["data"]["n"]
        assert (headers["x-dedup-key"], message.key().decode()) == (event_id, key)
        assert written[event_id] == (key, n), "the same event has the same id each time"
        assert places.setdefault(key, partition) == partition
        ids[event_id] += 1
        numbers.setdefault(key, []).append(n)
    assert ids.keys() == written.keys(), "nothing is lost"
    for key, came in numbers.items():
        assert list(dict.fromkeys(came)) == sorted(set(came)), f"{key}: {came}"
        back = [place for place in range(1, len(came)) if came[place] != came[place - 1] + 1]
        assert len(back) <= 1, f"{key} was begun again {len(back)} times: {came}"
        # From where it was begun again all comes again, in order.
        assert all(came[place] <= came[place - 1] for place in back), f"{key}: {came}"
    return sum(ids.values()) - len(ids)


@pytest.mark.slow
async def test_three_relays_one_killed(
    kafka_server: KafkaServer, processes: Processes, postgres_url: str, namespace: str
) -> None:
    """100,000 events of 1,000 keys: all SENT and at the broker, of each key in order; only what the killed one had in
    hand comes twice."""
    topic = Topic(kafka_server, namespace, 4)
    victim, *others = [
        processes.start("outbox", "relay", HOLDFAST_OUTBOX_TARGETS=to_kafka(kafka_server)) for _ in range(3)
    ]
    for relay in (victim, *others):
        await relay.has_said("relay started")
    written = await fill_outbox(postgres_url, topic.name, 1_000, 100)

    async def sent(at_least: int) -> bool:
        return (await statuses(postgres_url)).get("SENT", 0) >= at_least

    await eventually(lambda: sent(15_000), "a first part", 120)
    victim.kill()
    assert not await sent(len(written)), "in mid-run"
    await eventually(lambda: sent(len(written)), "the rest", 150)
    assert await statuses(postgres_url) == {"SENT": len(written)}
    for relay in others:
        relay.terminate()
    for relay in others:
        assert await relay.ended() == 0
    assert check_arrived(topic.read(), written) <= FLIGHTS * BATCH


async def test_killed_between_publish_and_mark(
    kafka_server: KafkaServer, processes: Processes, postgres_url: str, namespace: str
) -> None:
    """What was published and not marked comes again: the same ids, in the same order."""
    topic = Topic(kafka_server, namespace, 2)
    variables = {"HOLDFAST_OUTBOX_TARGETS": to_kafka(kafka_server), "HOLDFAST_OUTBOX_BATCH": "100"}
    written = await fill_outbox(postgres_url, topic.name, 50, 40)
    # Nobody else is at it while it lives: what it leaves behind need not be waited for as long as elsewhere.
    victim = processes.start(
        "outbox", "relay", program=("-c", DIES_BEFORE_MARKING), **variables, HOLDFAST_OUTBOX_LEASE_S="5"
    )
    assert await victim.ended() == -signal.SIGKILL
    marked, there = await statuses(postgres_url), len(topic.read())
    assert marked == {"SENT": 200, "NEW": 1_800}
    assert there >= 300, "it has published more than it has marked"
    processes.start("outbox", "relay", **variables)

    async def all_sent() -> bool:
        return await statuses(postgres_url) == {"SENT": len(written)}

    await eventually(all_sent, "the rest", 60)
    twice = check_arrived(topic.read(), written)
    assert twice == there - 200


async def test_a_broker_killed_in_mid_batch_and_back(
    make_kafka: MakeKafka, processes: Processes, postgres_url: str
) -> None:
    """The relay goes on by itself; nothing is lost, of each key in order."""
    server = make_kafka()
    topic = Topic(server, "orders", 2)
    relay = processes.start("outbox", "relay", HOLDFAST_OUTBOX_TARGETS=to_kafka(server), HOLDFAST_OUTBOX_BATCH="50")
    await relay.has_said("relay started")
    written = await fill_outbox(postgres_url, topic.name, 100, 50)

    async def are(status: str, at_least: int) -> bool:
        return (await statuses(postgres_url)).get(status, 0) >= at_least

    await eventually(lambda: are("SENT", 500), "a first part", 60)
    server.kill()
    assert not await are("SENT", len(written)), "in mid-run"
    await eventually(lambda: are("RETRYING", 1), "the first failure", 60)
    server.start()
    await eventually(lambda: are("SENT", len(written)), "the rest", 90)
    assert relay.alive
    # What the broker had written and not confirmed comes twice: one batch.
    assert check_arrived(topic.read(), written) <= 50


@pytest.mark.parametrize("kind", ["kafka", "rabbitmq"])
async def test_a_wrong_password_is_told_and_never_shown(
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
        return await statuses(postgres_url) == {"DEAD": 3}

    await eventually(dead, "the limit of tries", 60)
    shown = processes.start("outbox", "list", "--json")
    assert await shown.ended() == 0
    relay.terminate()
    assert await relay.ended() == 0
    told = relay.log.read_text() + shown.log.read_text()
    assert "events DEAD" in told
    assert SECRET not in told
    assert any(word in told for word in ("uthentication", "ACCESS_REFUSED", "refuse")), told


async def test_dead_after_the_limit_and_revived_by_hand(
    rabbitmq_server: RabbitServer, processes: Processes, postgres_url: str, namespace: str
) -> None:
    """Nobody has made the queue; once somebody has, `holdfast outbox retry` brings all of them there in order."""
    connection = {"host": "127.0.0.1", "port": rabbitmq_server.port, "user": USER, "password": PASSWORD}
    written = await fill_outbox(postgres_url, namespace, 2, 3)
    relay = processes.start(
        "outbox", "relay", HOLDFAST_OUTBOX_TARGETS=targets("rabbitmq", connection), HOLDFAST_OUTBOX_MAX_ATTEMPTS="2"
    )

    async def are(**wanted: int) -> bool:
        return await statuses(postgres_url) == wanted

    # The first of each key; the others wait behind it.
    await eventually(lambda: are(DEAD=2, NEW=4), "the limit of tries", 60)
    link = await aio_pika.connect(rabbitmq_server.url)
    async with link:
        channel = await link.channel()
        queue = await channel.declare_queue(namespace, durable=True, arguments={"x-queue-type": "quorum"})
        retry = processes.start("outbox", "retry", "--all-dead", "--reason", "the queue is there")
        assert await retry.ended() == 0, retry.log.read_text()
        await eventually(lambda: are(SENT=6), "all to be sent", 60)
        came = [await queue.get(no_ack=True) for _ in range(6)]
        assert await queue.get(fail=False) is None
    assert relay.alive
    numbers: dict[str, list[int]] = {}
    for message in came:
        assert message is not None
        key, n = written[str(message.message_id)]
        numbers.setdefault(key, []).append(n)
    assert numbers == {"key-0": [0, 1, 2], "key-1": [0, 1, 2]}
