"""Messages of all kinds on a real Kafka, end to end, and wrong passwords."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.brokers.kafka import KafkaAdapter, KafkaConfig
from holdfast.execution.backend import backend_of
from holdfast.testing import drain
from holdfast.triggers.config import QueueTriggerConfig
from holdfast.triggers.dedup import LedgerIdempotencyStore
from holdfast.triggers.runtime import CallableRuntime, Runtime
from holdfast.triggers.task_runtime import TaskRuntime
from holdfast.triggers.trigger import QueueTrigger
from tests.brokers.kafka_server import SASL_USER, KafkaServer
from tests.brokers.rabbitmq_server import USER
from tests.faults.broker_support import Processes, Topic, write_triggers
from tests.faults.support import eventually

pytestmark = [pytest.mark.faults]

SECRET = "not-the-password-8"
#: Key, body, headers, and the expected status.
MESSAGES: list[tuple[str | None, bytes | None, Any, str]] = [
    (None, b"1", None, "success"),
    ("k", b"2", [], "success"),
    # An empty message, and a tombstone, which has no value.
    (None, b"", None, "unparsable"),
    ("k", None, None, "success"),
    (None, b"{", [("x-tenant-id", b"acme")], "unparsable"),
    (None, b"\xff\xfe\x00", None, "unparsable"),
    (None, b"[" * 100_000, None, "unparsable"),
    (None, b'"' + b"x" * 2_000 + b'"', None, "unparsable"),
    # Unusual headers: without value, not UTF-8, repeated, empty, long, with control characters, in capitals.
    (None, b"3", [("x-event-name", None), ("x-dedup-key", None)], "success"),
    (None, b"4", [("x-event-name", b"\xff\xfe"), ("\u00e4", b"\x00\x01"), ("x-dedup-key", b"\xff")], "success"),
    (None, b"5", [("X-DEDUP-KEY", b"five"), ("x-event-name", b"a"), ("x-event-name", b"b")], "success"),
    (None, b"6", [("x-dedup-key", b"five")], "duplicate"),
    (None, b"7", [("", b""), ("x-dedup-key", b""), ("traceparent", b"nonsense")], "success"),
    (None, b"8", [("x-dedup-key", b"k" * 5_000), ("x-other", b"v" * 50_000)], "success"),
    ("\u00fc" * 300, b"9", [("x-event-name", b"line\nbreak\x00")], "unparsable"),
    (None, b"10", [("x-tenant-id", b"no such {tenant}")], "unparsable"),
    ("k", b"11", None, "success"),
]


def make_trigger(server: KafkaServer, topic: Topic, runtime: Runtime, **options: Any) -> QueueTrigger:
    adapter = KafkaAdapter(KafkaConfig(bootstrap_servers=server.address), topic.name, "shop", prefetch=100)
    config = QueueTriggerConfig(
        queue_name=topic.name, consumer_group="shop", concurrency=5, retry_backoff_base=0.01, max_retries=2
    )
    return QueueTrigger(config, adapter, runtime, payload_limit=1_000, **options)


async def test_messages_of_all_kinds(kafka_server: KafkaServer, tmp_path: Path, namespace: str) -> None:
    """Each message runs, is a duplicate, or becomes an unchanged dead letter; none blocks the next."""
    topic = Topic(kafka_server, namespace, 1)
    dlq = Topic(kafka_server, f"{namespace}.dlq", 1)
    topic.fill((key, body, headers) for key, body, headers, _ in MESSAGES)
    app, ran = Holdfast(f"sqlite:///{tmp_path / 'all.db'}"), list[int | None]()

    @app.task
    async def handle(message: int | None) -> None:
        ran.append(message)

    async with app:
        backend = backend_of(app)
        assert backend.ledger is not None
        book = backend.ledger.triggers
        async with make_trigger(kafka_server, topic, TaskRuntime(app, "handle"), book=book) as trigger:
            await eventually(lambda: sum(trigger.counts.consumed.values()) >= len(MESSAGES), "all of them")
        await drain(app)
        rows = {row.message_id: row for row in await book.executions(None)}
    statuses = [rows[f"{topic.name}-0-{offset}"].status.value for offset in range(len(MESSAGES))]
    assert statuses == [status for *_, status in MESSAGES]
    assert sorted(n or 0 for n in ran) == [0, 1, 2, 3, 4, 5, 7, 8, 11]
    assert None in ran
    assert topic.count_uncommitted("shop") == 0
    dead_letters = {dict(message.headers())["x-dead-message-id"].decode(): message for _, message in dlq.read()}
    unparsable = [offset for offset, (*_, status) in enumerate(MESSAGES) if status == "unparsable"]
    assert dead_letters.keys() == {f"{topic.name}-0-{offset}" for offset in unparsable}
    for offset in unparsable:
        dead_letter = dead_letters[f"{topic.name}-0-{offset}"]
        assert dead_letter.value() == MESSAGES[offset][1]
        assert dict(dead_letter.headers())["x-dead-reason"]


async def test_a_poison_message_is_a_dead_letter_and_others_continue(
    kafka_server: KafkaServer, tmp_path: Path, namespace: str
) -> None:
    topic = Topic(kafka_server, namespace, 1)
    dlq = Topic(kafka_server, f"{namespace}.dlq", 1)
    topic.fill((f"key-{number % 3}", b"%d" % number, [("x-own", b"kept")]) for number in range(60))
    ran: list[int] = []
    tries: list[int] = []

    async def act(event_name: str, context: Any, focus: str | None, tenant_id: str) -> str:
        if context["message"] == 30:
            tries.append(1)
            raise RuntimeError("this one never works")
        ran.append(context["message"])
        return f"run-{context['message']}"

    async with Holdfast(f"sqlite:///{tmp_path / 'all.db'}") as app:
        backend = backend_of(app)
        assert backend.ledger is not None
        ledger = backend.ledger
        options = {"book": ledger.triggers, "dedup": LedgerIdempotencyStore(ledger.effects, topic.name)}
        async with make_trigger(kafka_server, topic, CallableRuntime(act), **options) as trigger:
            await eventually(lambda: sum(trigger.counts.consumed.values()) >= 60, "all of them")
        failed = [row for row in await ledger.triggers.executions(None) if row.status == "failed"]
    assert len(tries) == 3
    for key in range(3):
        assert [n for n in ran if n % 3 == key] == [n for n in range(key, 60, 3) if n != 30], (
            "messages behind the poison message are out of order"
        )
    assert [(row.message_id, row.retry_count) for row in failed] == [(f"{topic.name}-0-30", 2)]
    ((_, dead_letter),) = dlq.read()
    headers = dict(dead_letter.headers())
    assert (dead_letter.value(), headers["x-own"]) == (b"30", b"kept")
    assert b"failed after 3 attempts" in headers["x-dead-reason"]
    assert headers["x-dead-history"].count(b"this one never works") == 3
    assert topic.count_uncommitted("shop") == 0


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.clean_up()


@pytest.mark.parametrize("kind", ["kafka", "rabbitmq"])
async def test_a_wrong_password_is_reported_and_never_shown(
    request: pytest.FixtureRequest, kind: str, processes: Processes, tmp_path: Path, namespace: str
) -> None:
    server: Any = request.getfixturevalue(f"{kind}_server")
    if kind == "kafka":
        connection: dict[str, Any] = {
            "bootstrap_servers": server.sasl_address,
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_username": SASL_USER,
            "sasl_password": "${BROKER_PASSWORD}",
        }
    else:
        connection = {"url": "${BROKER_URL}"}
    file = write_triggers(
        tmp_path,
        {
            "name": "orders",
            "queue_name": namespace,
            "consumer_group": "shop",
            "adapter": {"type": kind, "connection": connection},
            "runtime": {"task": "take"},
        },
    )
    for args in (("run", file, "app.py:app", "--log-level", "debug"), ("check", file, "app.py:app", "--connect")):
        process = processes.start(
            "trigger",
            *args,
            HOLDFAST_URL=f"sqlite:///{tmp_path / 'jobs.db'}",
            BROKER_PASSWORD=SECRET,
            BROKER_URL=f"amqp://{USER}:{SECRET}@127.0.0.1:{server.port}/",
        )
        assert await process.wait_ended() != 0
        output = process.log.read_text()
        assert "BROKER_REFUSED: trigger orders: " in output
        assert SECRET not in output
