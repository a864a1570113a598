"""A denied message is recorded, then acknowledged or dead-lettered, and never delivered again (requirement T8)."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.brokers.factory import build_adapter, dead_letter_queue
from holdfast.brokers.port import OutgoingMessage
from holdfast.guard.decisions import Decision, Deny, GuardRequest
from holdfast.ledger.port.messages import ExecutionStatus
from holdfast.triggers.config import QueueTriggerConfig, TriggerEntry
from holdfast.triggers.dedup import InMemoryIdempotencyStore
from holdfast.triggers.trigger import QueueTrigger
from tests.triggers.properties.memory_rig import make_gate
from tests.triggers.rig import MemoryTriggerStore, Recorder, Rig, until
from tests.triggers.test_replay import adapter_of, publish, take
from tests.triggers.test_replay import entry as entry

POLICIES = ["ack", "nack", "requeue", "dlq"]


class Denying:
    """A guard that denies messages with this body, and counts its calls for them."""

    def __init__(self, denied: Any) -> None:
        self.calls = 0
        self._denied = denied

    async def deny(self, request: GuardRequest) -> Decision | None:
        if request.arguments["message"] != self._denied:
            return None
        self.calls += 1
        return Deny("not for you")


def trigger_of(entry: TriggerEntry, policy: str, guard: Denying, runtime: Recorder) -> QueueTrigger:
    config = QueueTriggerConfig(
        queue_name=entry.queue_name,
        consumer_group=entry.consumer_group,
        ack_policy=policy,
        retry_backoff_base=0.01,
        concurrency=1,
    )
    return QueueTrigger(
        config,
        adapter_of(entry),
        runtime,
        guards=make_gate(guard.deny),
        book=MemoryTriggerStore(),
        dedup=InMemoryIdempotencyStore(),
    )


@pytest.mark.parametrize("policy", ["nack", "requeue", "dlq"])
async def test_a_denied_message_is_settled_for_good(entry: TriggerEntry, policy: str) -> None:
    """On every broker: the trigger is started twice, and a later message shows that the broker has no earlier one."""
    guard, runtime = Denying("denied"), Recorder()
    # SQS drops messages with equal bodies in FIFO queues; the key keeps the order on Kafka.
    async with trigger_of(entry, policy, guard, runtime) as trigger:
        await publish(entry, OutgoingMessage(entry.queue_name, b'"denied"', {}, "k", "event-1"))
        await until(lambda: trigger.counts.consumed[ExecutionStatus.REJECTED])
    async with trigger_of(entry, policy, guard, runtime) as trigger:
        await publish(entry, OutgoingMessage(entry.queue_name, b'"later"', {}, "k", "event-2"))
        await until(lambda: runtime.calls)
        assert trigger.counts.consumed[ExecutionStatus.REJECTED] == 0
    assert (runtime.messages, guard.calls) == (["later"], 1)
    dead = build_adapter(
        entry.adapter.type, entry.adapter.connection, dead_letter_queue(entry.adapter.type, entry.queue_name), "readers"
    )
    if policy == "dlq":
        await dead.connect()
        async for message in take(dead, 1):
            assert (message.body, "not for you" in message.headers["x-dead-reason"]) == (b'"denied"', True)
            await dead.ack(message)
        await dead.close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("denied_by", ["guard", "tenants"])
async def test_every_policy_settles_a_denied_message_once(policy: str, denied_by: str) -> None:
    options: dict[str, Any] = (
        {"gate": make_gate(Denying(1).deny)} if denied_by == "guard" else {"tenants": ["acme"], "gate": None}
    )
    rig = Rig(Recorder(), ack_policy=policy, **options)
    rig.write(1, tenant_id="acme" if denied_by == "guard" else "zoo")
    rig.write(2, tenant_id="acme")
    await rig.run(2)
    assert rig.adapter.settle_actions == ["dlq" if policy == "dlq" else "ack", "ack"]
    assert [row.status for row in rig.rows if row.status == "rejected"] == ["rejected"]
    assert await rig.adapter.lag() == 0
    assert not rig.slept


@pytest.mark.parametrize("policy", ["requeue", "dlq"])
async def test_a_denial_is_recorded_before_the_message_is_settled(policy: str) -> None:
    rig = Rig(Recorder(), ack_policy=policy, gate=make_gate(Denying(1).deny))
    rig.book.down = True
    rig.write(1)
    rig.write(2)
    async with rig.trigger:
        # The other message is not delayed by the one that cannot be recorded.
        await until(lambda: rig.counts.consumed[ExecutionStatus.SUCCESS])
        await until(lambda: rig.book.failures > 2)
        assert rig.adapter.settle_actions == ["ack"]
        assert rig.counts.consumed[ExecutionStatus.REJECTED] == 0
        rig.book.down = False
        await until(lambda: rig.counts.consumed[ExecutionStatus.REJECTED])
        assert [row.status for row in rig.rows if row.status == "rejected"] == ["rejected"]
    assert rig.adapter.settle_actions == ["ack", "dlq" if policy == "dlq" else "ack"]
    assert rig.counts.consumed[ExecutionStatus.REJECTED] == 1
