"""Triggers on a real Kafka: killed and added processes, rebalances."""

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
from holdfast.triggers.config import QueueTriggerConfig
from holdfast.triggers.trigger import QueueTrigger
from tests.brokers.kafka_server import KafkaServer
from tests.conftest import MakeServer
from tests.faults.broker_support import Processes, Topic, group_by_key, read_created_jobs, write_triggers
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
    """Yield `each` numbered messages of every key, interleaved."""
    for n in range(each):
        for key in range(keys):
            body = msgspec.json.encode({"key": f"key-{key}", "n": n})
            yield f"key-{key}", body, [("x-dedup-key", b"%d-%d" % (key, n))]


async def test_killing_and_adding_a_process_loses_and_repeats_nothing(
    kafka_server: KafkaServer, make_redis: MakeServer, processes: Processes, tmp_path: Path, namespace: str
) -> None:
    """100,000 messages: each becomes one job, in order per key, and all offsets are committed."""
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
            await process.wait_for_log("trigger orders started")
        await eventually(lambda: first.has_logged("assigned partitions"), "the assignment")
        await eventually(lambda: jobs(15_000), "a first part of the jobs", 120)
        first.kill()
        added = start()
        await eventually(lambda: topic.count_uncommitted("shop") == 0, "all offsets to be committed", 150)
        await eventually(lambda: added.has_logged("assigned partitions"), "the assignment of the new process")
        for process in (*others, added):
            process.terminate()
        for process in (*others, added):
            assert await process.wait_ended() == 0
        assert await jobs(KEYS * EACH), "messages were lost"
        assert not await jobs(KEYS * EACH + 1)
        created = await read_created_jobs(app)
    assert len({job["idempotency_key"] for job in created}) == len(created) == KEYS * EACH
    received = group_by_key(decode_message(job) for job in created)
    assert received == {f"key-{key}": list(range(EACH)) for key in range(KEYS)}
    assert topic.count_uncommitted("shop") == 0


async def test_rebalances_repeat_nothing_and_keep_the_order(kafka_server: KafkaServer, namespace: str) -> None:
    """Without dedup: a message that ran is not run again by the next owner of its partition, and messages of one key
    do not overlap."""
    topic = Topic(kafka_server, namespace, 4)
    topic.fill(numbered(100, 40))
    connection = KafkaConfig(bootstrap_servers=kafka_server.address, session_timeout_s=3, revoke_wait_s=20)
    started: list[Any] = []
    busy: set[str] = set()
    run_fast = asyncio.Event()

    async def act(context: Any) -> str:
        message = context["message"]
        assert message["key"] not in busy
        busy.add(message["key"])
        started.append(message)
        # Slow enough to leave work for new members.
        await asyncio.sleep(0.01 if run_fast.is_set() else 0.2)
        busy.discard(message["key"])
        return ""

    # A single member has messages of all partitions in flight.
    config = QueueTriggerConfig(
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
    await eventually(lambda: len(started) >= 50, "the first runs")
    for _ in range(2):
        newest = await join()
        await eventually(partial(_has_worked, newest), "its share")
    await members[1].stop()
    run_fast.set()
    await eventually(lambda: topic.count_uncommitted("shop") == 0, "the rest", 60)
    for member in members:
        await member.stop()
    assert group_by_key(started) == {f"key-{key}": list(range(40)) for key in range(100)}
    assert sum(member.counts.lost_messages for member in members) > 0, (
        "no message was in flight when its partition was revoked"
    )
    assert sum(sum(member.counts.consumed.values()) for member in members) == 4_000
    assert sum(member.counts.consumed[ExecutionStatus.SUCCESS] for member in members) == 4_000


def _has_worked(member: QueueTrigger) -> bool:
    return sum(member.counts.consumed.values()) > 0


def decode_message(job: dict[str, Any]) -> Any:
    payload = job["payload"]
    decoded = msgspec.json.decode(payload) if isinstance(payload, bytes | str) else payload
    return decoded["message"] if isinstance(decoded, dict) else decoded[0]
