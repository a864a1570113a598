"""Triggers on a real Kafka: processes that die and join in mid-run, brokers that die, rebalances."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import Holdfast
from holdfast.brokers.kafka import KafkaAdapter, KafkaConfig
from holdfast.ledger.port.messages import ExecutionStatus
from holdfast.triggers.config import TriggerConfig
from holdfast.triggers.trigger import QueueTrigger
from tests.brokers.kafka_server import KafkaServer
from tests.conftest import MakeServer
from tests.faults.broker_support import Processes, Topic, accepted, by_key, write_triggers
from tests.faults.support import eventually
from tests.triggers.rig import Recorder

pytestmark = [pytest.mark.faults, pytest.mark.redis, pytest.mark.slow]

KEYS = 1_000
EACH = 100
PARTITIONS = 6


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.clean_up()


def numbered(keys: int, each: int) -> Iterator[tuple[str, bytes, Any]]:
    """`each` numbered messages of every key, mixed."""
    for n in range(each):
        for key in range(keys):
            body = msgspec.json.encode({"key": f"key-{key}", "n": n})
            yield f"key-{key}", body, [("x-dedup-key", b"%d-%d" % (key, n))]


async def test_three_processes_one_killed_and_one_added(
    kafka_server: KafkaServer, make_redis: MakeServer, processes: Processes, tmp_path: Path, namespace: str
) -> None:
    """100,000 messages: each is a job exactly once, of each key in order, and at last all offsets are committed."""
    topic = Topic(kafka_server, namespace, PARTITIONS)
    topic.fill(numbered(KEYS, EACH))
    connection = {"bootstrap_servers": kafka_server.address, "session_timeout_s": 6}
    file = write_triggers(
        tmp_path,
        {
            "name": "orders",
            "queue_name": topic.name,
            "consumer_group": "shop",
            "adapter": {"type": "kafka", "connection": connection},
            "runtime": {"task": "take"},
            "concurrency": 100,
            "prefetch": 1_000,
        },
    )
    url = make_redis().url
    variables = {"HOLDFAST_URL": url, "HOLDFAST_FEED_LIMIT": "1000000"}
    async with Holdfast(url, feed_limit=1_000_000) as app:

        async def jobs(at_least: int) -> bool:
            stats = await app.engine.stats("default")
            return sum(stats.states.values()) >= at_least

        def start() -> Any:
            return processes.start("trigger", "run", file, "app.py:app", **variables)

        first, *others = [start() for _ in range(3)]
        for process in (first, *others):
            await process.has_said("trigger orders started")
        await eventually(lambda: first.said("assigned partitions"), "its partitions")
        await eventually(lambda: jobs(15_000), "a first part of the jobs", 120)
        first.kill()
        added = start()
        await eventually(lambda: topic.left("shop") == 0, "all offsets to be committed", 150)
        await eventually(lambda: added.said("assigned partitions"), "the new one's partitions")
        for process in (*others, added):
            process.terminate()
        for process in (*others, added):
            assert await process.ended() == 0
        assert await jobs(KEYS * EACH), "nothing is lost"
        assert not await jobs(KEYS * EACH + 1)
        born = await accepted(app)
    assert len({job["idempotency_key"] for job in born}) == len(born) == KEYS * EACH
    came = by_key(message_of(job) for job in born)
    assert came == {f"key-{key}": list(range(EACH)) for key in range(KEYS)}
    assert topic.left("shop") == 0


async def test_members_that_come_and_go_repeat_nothing_and_keep_the_order(
    kafka_server: KafkaServer, namespace: str
) -> None:
    """Without anybody who knows duplicates: what was handed over once is not handed over again by those who get its
    partition, and of each key one hand-over begins after the one before it has ended."""
    topic = Topic(kafka_server, namespace, 4)
    topic.fill(numbered(100, 40))
    connection = KafkaConfig(bootstrap_servers=kafka_server.address, session_timeout_s=3, revoke_wait_s=20)
    begun: list[Any] = []
    busy: set[str] = set()
    hurry = asyncio.Event()

    async def act(context: Any) -> str:
        message = context["message"]
        assert message["key"] not in busy
        busy.add(message["key"])
        begun.append(message)
        # Slow enough to have work left for whoever joins.
        await asyncio.sleep(0.01 if hurry.is_set() else 0.2)
        busy.discard(message["key"])
        return ""

    # Whoever is alone has messages of all partitions in hand.
    config = TriggerConfig(
        queue_name=topic.name, consumer_group="shop", concurrency=20, prefetch=4_000, max_retries=0, enable_dedup=False
    )
    runtime = Recorder(lambda context: act(context))
    members: list[QueueTrigger] = []

    async def join() -> QueueTrigger:
        adapter = KafkaAdapter(connection, topic.name, "shop", prefetch=config.prefetch)
        member = QueueTrigger(config, adapter, runtime)
        members.append(member)
        await member.start()
        return member

    await join()
    await eventually(lambda: len(begun) >= 50, "the first hand-overs")
    for _ in range(2):
        newest = await join()
        await eventually(partial(_has_worked, newest), "its share")
    await members[1].stop()
    hurry.set()
    await eventually(lambda: topic.left("shop") == 0, "the rest", 60)
    for member in members:
        await member.stop()
    assert by_key(begun) == {f"key-{key}": list(range(40)) for key in range(100)}
    assert sum(member.counts.lost_messages for member in members) > 0, "some were in hand when their partition went"
    assert sum(sum(member.counts.consumed.values()) for member in members) == 4_000
    assert sum(member.counts.consumed[ExecutionStatus.SUCCESS] for member in members) == 4_000


def _has_worked(member: QueueTrigger) -> bool:
    return sum(member.counts.consumed.values()) > 0


def message_of(job: dict[str, Any]) -> Any:
    payload = job["payload"]
    decoded = msgspec.json.decode(payload) if isinstance(payload, bytes | str) else payload
    return decoded["message"] if isinstance(decoded, dict) else decoded[0]
