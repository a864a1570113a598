"""Offsets in flight of a Kafka consumer: which messages may be delivered and which offsets may be committed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from threading import Thread
from time import monotonic

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.brokers.kafka import KafkaAdapter, KafkaConfig
from holdfast.brokers.kafka.offsets import InFlightOffsets
from holdfast.brokers.port import RawMessage, timestamp_from_ms


def message(partition: int, offset: int, share: int, deliveries: int = 1) -> RawMessage:
    metadata = {"topic": "t", "partition": partition, "offset": offset, "share": share}
    return RawMessage(f"t-{partition}-{offset}", b"", {}, datetime.now(UTC), metadata, deliveries=deliveries)


def add_message(offsets: InFlightOffsets, partition: int, offset: int) -> RawMessage:
    share = offsets.add(partition, offset)
    assert share is not None
    return message(partition, offset, share)


#: Take a message (with a gap), settle one in flight, requeue one, lose and regain the partition, commit.
STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "take", "settle", "settle", "again", "regain", "commit"]), st.integers(0, 30)),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_a_commit_never_passes_a_message_in_flight(steps: list[tuple[str, int]]) -> None:
    offsets = InFlightOffsets(1_000)
    offsets.assign([0])
    next_offset, committed = 0, 0
    in_flight: dict[int, RawMessage] = {}
    stale_messages: list[RawMessage] = []
    for step, number in steps:
        chosen = list(in_flight)[number % len(in_flight)] if in_flight else None
        match step:
            case "take":
                next_offset += number % 3
                in_flight[next_offset] = add_message(offsets, 0, next_offset)
                next_offset += 1
            case "settle" if chosen is not None:
                offsets.ack(in_flight.pop(chosen))
            case "again" if chosen is not None:
                stale_messages.append(in_flight[chosen])
                deliveries = offsets.redeliver(in_flight[chosen])
                assert deliveries == in_flight[chosen].deliveries + 1
                in_flight[chosen] = message(0, chosen, in_flight[chosen].metadata["share"], deliveries)
            case "regain":
                stale_messages += in_flight.values()
                in_flight.clear()
                offsets.revoke([0])
                offsets.assign([0])
                # The broker restarts at the committed offset.
                next_offset = committed
            case "commit":
                for offset in offsets.to_commit().values():
                    assert offset == min(in_flight, default=next_offset)
                    assert offset >= committed
                    committed = offset
        for stale in stale_messages:
            assert not offsets.can_deliver(stale)
            offsets.ack(stale)
        assert offsets.free_slots() == 1_000 - len(in_flight)
        assert all(offsets.can_deliver(pending) for pending in in_flight.values())


def test_a_rewind_replaces_the_messages_read_before() -> None:
    offsets = InFlightOffsets(10)
    offsets.assign([0])
    before = [add_message(offsets, 0, offset) for offset in (5, 6)]
    rewound = add_message(offsets, 0, 3)
    assert [offsets.holds(stale_messages) for stale_messages in before] == [False, False]
    assert offsets.holds(rewound)
    assert (offsets.free_slots(), offsets.to_commit()) == (9, {0: 3})


def test_a_failed_commit_is_retried() -> None:
    offsets = InFlightOffsets(10)
    offsets.assign([0, 1])
    offsets.ack(add_message(offsets, 0, 7))
    assert offsets.to_commit() == {0: 8}
    assert offsets.to_commit() == {}
    offsets.not_committed([0, 1, 2])
    assert offsets.to_commit() == {0: 8}


def test_started_messages_of_a_revoked_partition_are_committed() -> None:
    offsets = InFlightOffsets(10)
    offsets.assign([0])
    started, waiting = add_message(offsets, 0, 0), add_message(offsets, 0, 1)
    assert offsets.holds(started)
    handovers: list[int] = []
    revoking = Thread(target=lambda: handovers.append(offsets.wait_for_handovers([0], 20)))
    revoking.start()
    while offsets.can_deliver(waiting):
        pass
    assert not offsets.holds(waiting)
    assert offsets.add(0, 2) is None
    offsets.ack(started)
    revoking.join(20)
    assert handovers == [0]
    assert offsets.to_commit([0]) == {0: 1}


def test_waiting_for_started_messages_has_a_timeout() -> None:
    offsets = InFlightOffsets(10)
    offsets.assign([0])
    assert offsets.holds(add_message(offsets, 0, 0))
    started_at = monotonic()
    assert offsets.wait_for_handovers([0, 9], 0.05) == 1
    assert 0.04 < monotonic() - started_at < 5


def test_wait_for_capacity_returns_when_a_message_is_acknowledged() -> None:
    offsets = InFlightOffsets(1)
    offsets.assign([0])
    pending = add_message(offsets, 0, 0)
    assert not offsets.wait_for_capacity(0.01)
    Thread(target=offsets.ack, args=(pending,)).start()
    assert offsets.wait_for_capacity(20)


def test_a_waiter_for_room_is_woken_when_enough_is_free() -> None:
    """Waking per message would cost a thread switch each; at the timeout, any free capacity counts."""
    offsets = InFlightOffsets(8)
    offsets.assign([0])
    pending = [add_message(offsets, 0, offset) for offset in range(8)]
    offsets.ack(pending[0])
    started_at = monotonic()
    assert offsets.wait_for_capacity(0.05)
    assert monotonic() - started_at > 0.04
    Thread(target=offsets.ack, args=(pending[1],)).start()
    started_at = monotonic()
    assert offsets.wait_for_capacity(20)
    assert monotonic() - started_at < 10


def test_a_message_of_another_consumer_is_ignored() -> None:
    one, other = InFlightOffsets(5), InFlightOffsets(5)
    one.assign([0])
    other.assign([0])
    foreign, own = add_message(one, 0, 0), add_message(other, 0, 0)
    other.ack(foreign)
    assert other.redeliver(foreign) is None
    assert other.holds(own)


async def test_messages_of_a_revoked_partition_are_not_delivered() -> None:
    adapter = KafkaAdapter(KafkaConfig(bootstrap_servers="127.0.0.1:1"), "t", "g")
    offsets = adapter._offsets
    offsets.assign([0, 1])
    batch = [add_message(offsets, partition, offset) for offset in range(3) for partition in (0, 1)]
    adapter._on_messages(batch)
    stream = adapter.consume()
    assert await anext(stream) is batch[0]
    await adapter.nack(batch[0], requeue=True)
    offsets.revoke([0])
    offsets.assign([0])
    assert [(await anext(stream)).message_id for _ in range(3)] == ["t-1-0", "t-1-1", "t-1-2"]
    # A redelivered message is another delivery.
    adapter._on_messages([add_message(offsets, 0, 0)])
    assert (await anext(stream)).message_id == "t-0-0"
    await adapter.close()
    assert [message async for message in stream] == []


def test_an_impossible_timestamp_becomes_the_current_time() -> None:
    """For example microseconds instead of milliseconds: one such message must not stop its consumer repeatedly."""
    assert timestamp_from_ms(1_763_247_000_000) == datetime(2025, 11, 15, 22, 50, tzinfo=UTC)
    for odd in (1_763_247_000_000_000, 2**63 - 1, -(2**63)):
        assert abs(timestamp_from_ms(odd) - datetime.now(UTC)) < timedelta(minutes=1)


def test_a_position_behind_markers_is_committed_once_nothing_before_it_is_in_flight() -> None:
    offsets = InFlightOffsets(10)
    offsets.assign([0])
    in_flight = add_message(offsets, 0, 4)
    offsets.reach({0: 7, 1: 3})
    assert offsets.to_commit() == {0: 4}
    offsets.ack(in_flight)
    assert offsets.to_commit() == {0: 7}
    offsets.reach({0: 6})
    assert offsets.to_commit() == {}


def test_a_position_of_an_earlier_assignment_is_not_committed() -> None:
    offsets = InFlightOffsets(10)
    offsets.assign([0, 1], {0: 100, 1: 100})
    offsets.reach({0: 100, 1: 96})
    assert offsets.to_commit() == {1: 96}
    offsets.ack(add_message(offsets, 0, 95))
    offsets.reach({0: 96})
    assert offsets.to_commit() == {0: 96}
