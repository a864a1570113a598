"""A message becomes a job (X4, end to end): published, consumed, run by a worker, acknowledged, recorded once.

On every broker, with real servers; embedded, and with Redis and PostgreSQL.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from holdfast import Holdfast, State
from holdfast.brokers.factory import build_adapter, build_publisher
from holdfast.brokers.port import OutgoingMessage
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.messages import ExecutionStatus
from holdfast.triggers.config import TriggerEntry
from holdfast.triggers.service import build_trigger
from tests.brokers.rabbitmq_server import PASSWORD, USER
from tests.brokers.sqs_server import ACCESS_KEY, REGION, SECRET_KEY
from tests.worker.support import eventually, working

pytestmark = pytest.mark.brokers

TIMEOUT_S: Final = 60


@pytest.fixture(params=["embedded", "redis and postgres"])
def stores(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> dict[str, Any]:
    if request.param == "embedded":
        return {"url": f"sqlite:///{tmp_path / 'all.db'}"}
    url, ledger = request.getfixturevalue("redis_url"), request.getfixturevalue("postgres_url")
    return {"url": url, "ledger": ledger, "namespace": namespace}


@pytest.fixture(params=["kafka", "rabbitmq", "sqs", "redis"])
def broker(request: pytest.FixtureRequest, namespace: str) -> tuple[str, dict[str, Any]]:
    """Broker type and connection. The queue exists or is created when the trigger connects."""
    match request.param:
        case "kafka":
            address = request.getfixturevalue("kafka_server").address
            admin = AdminClient({"bootstrap.servers": address}, logger=logging.getLogger("test.kafka"))
            admin.create_topics([NewTopic(namespace, 2, 1)])[namespace].result()
            return "kafka", {"bootstrap_servers": address}
        case "rabbitmq":
            port = request.getfixturevalue("rabbitmq_server").port
            return "rabbitmq", {"host": "127.0.0.1", "port": port, "user": USER, "password": PASSWORD}
        case "sqs":
            url = request.getfixturevalue("sqs_server").url
            keys = {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY}
            return "sqs", {"endpoint_url": url, "region": REGION, **keys, "declare": True, "wait_time_s": 0}
        case _:
            return "redis", {"url": request.getfixturevalue("redis_url")}


async def test_a_message_is_consumed_run_acknowledged_and_recorded_once(
    broker: tuple[str, dict[str, Any]], stores: dict[str, Any], namespace: str
) -> None:
    kind, connection = broker
    app, runs = Holdfast(**stores), list[tuple[str, Any]]()

    @app.task
    async def handle(event_name: str, message: Any) -> str:
        runs.append((event_name, message))
        return "done"

    entry = TriggerEntry.model_validate(
        {
            "queue_name": namespace,
            "consumer_group": f"{namespace}-workers",
            "adapter": {"type": kind, "connection": connection},
            "runtime": {"task": "handle"},
        }
    )
    async with app:
        backend = backend_of(app)
        assert backend.ledger is not None
        trigger_store = backend.ledger.triggers
        trigger = build_trigger(app, entry).trigger
        async with working(app), trigger:
            await publish(kind, connection, namespace, number=1)
            await eventually(lambda: trigger.counts.consumed[ExecutionStatus.SUCCESS] == 1, "the message")
            # The same message again, as a sender does whose reply was lost.
            await publish(kind, connection, namespace, number=1)
            await eventually(lambda: trigger.counts.consumed[ExecutionStatus.DUPLICATE] == 1, "its duplicate")
            (job_id,) = {
                row.agent_run_id for row in await eventually(lambda: find_two_rows(app, namespace), "the rows")
            }
            assert await app.job(job_id).result(timeout=TIMEOUT_S) == "done"
        assert trigger.in_flight == 0
        rows = await trigger_store.executions(None, queue_name=namespace)
        (success,) = [row for row in rows if row.status == "success"]
        assert sorted(row.status for row in rows) == ["duplicate", "success"]
        assert (success.tenant_id, success.event_name, success.trace_id) == ("acme", "order.paid", "trace-1")
        assert (success.agent_run_id, success.retry_count, success.error_message) == (job_id, 0, "")
        assert await trigger_store.executions(["acme"], queue_name=namespace, message_id=success.message_id) == [
            success
        ]
        info = await app.job(job_id).info()
        assert (info.state, info.tenant_id, info.trace_id) == (State.SUCCEEDED, "acme", "trace-1")
    assert runs == [("order.paid", {"n": 1})]
    # Acknowledged: the closed consumer has released its messages, and the next one of the group gets only new ones.
    next_consumer = build_adapter(kind, connection, namespace, f"{namespace}-workers")
    await next_consumer.connect()
    try:
        await publish(kind, connection, namespace, number=2)
        async with asyncio.timeout(TIMEOUT_S):
            assert (await anext(aiter(next_consumer.consume()))).body == b'{"n": 2}'
    finally:
        await next_consumer.close()


async def publish(kind: str, connection: dict[str, Any], queue: str, *, number: int) -> None:
    headers = {
        "x-event-name": "order.paid",
        "x-tenant-id": "acme",
        "x-dedup-key": f"order-{number}",
        "x-trace-id": f"trace-{number}",
    }
    publisher = build_publisher(kind, connection)
    await publisher.connect()
    try:
        assert await publisher.publish([OutgoingMessage(queue, b'{"n": %d}' % number, headers, key="order")]) == [None]
    finally:
        await publisher.close()


async def find_two_rows(app: Holdfast, queue: str) -> list[Any]:
    backend = backend_of(app)
    assert backend.ledger is not None
    rows = await backend.ledger.triggers.executions(None, queue_name=queue)
    return rows if len(rows) == 2 else []
