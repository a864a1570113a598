"""What a consumer of Kafka has in hand, what of it is delivered, and how far it may commit."""

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
    place = {"topic": "t", "partition": partition, "offset": offset, "share": share}
    return RawMessage(f"t-{partition}-{offset}", b"", {}, datetime.now(UTC), place, deliveries=deliveries)


def taken(holdings: InFlightOffsets, partition: int, offset: int) -> RawMessage:
    share = holdings.add(partition, offset)
    assert share is not None
    return message(partition, offset, share)


#: take (with a gap), settle one of those in hand, requeue one, lose and regain the partition, commit.
STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "take", "settle", "settle", "again", "regain", "commit"]), st.integers(0, 30)),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_a_commit_never_passes_what_is_in_hand(steps: list[tuple[str, int]]) -> None:
    holdings = InFlightOffsets(1_000)
    holdings.assign([0])
    next_offset, committed = 0, 0
    in_hand: dict[int, RawMessage] = {}
    old: list[RawMessage] = []
    for word, number in steps:
        chosen = list(in_hand)[number % len(in_hand)] if in_hand else None
        match word:
            case "take":
                next_offset += number % 3
                in_hand[next_offset] = taken(holdings, 0, next_offset)
                next_offset += 1
            case "settle" if chosen is not None:
                holdings.ack(in_hand.pop(chosen))
            case "again" if chosen is not None:
                old.append(in_hand[chosen])
                deliveries = holdings.redeliver(in_hand[chosen])
                assert deliveries == in_hand[chosen].deliveries + 1
                in_hand[chosen] = message(0, chosen, in_hand[chosen].metadata["share"], deliveries)
            case "regain":
                old += in_hand.values()
                in_hand.clear()
                holdings.revoke([0])
                holdings.assign([0])
                # The broker begins again at what was committed.
                next_offset = committed
            case "commit":
                for offset in holdings.to_commit().values():
                    assert offset == min(in_hand, default=next_offset)
                    assert offset >= committed
                    committed = offset
        for stale in old:
            assert not holdings.can_deliver(stale)
            holdings.ack(stale)
        assert holdings.free_slots() == 1_000 - len(in_hand)
        assert all(holdings.can_deliver(held) for held in in_hand.values())


def test_what_comes_again_from_further_back_replaces_what_came_before() -> None:
    holdings = InFlightOffsets(10)
    holdings.assign([0])
    before = [taken(holdings, 0, offset) for offset in (5, 6)]
    again = taken(holdings, 0, 3)
    assert [holdings.holds(old) for old in before] == [False, False]
    assert holdings.holds(again)
    assert (holdings.free_slots(), holdings.to_commit()) == (9, {0: 3})


def test_a_failed_commit_is_tried_again() -> None:
    holdings = InFlightOffsets(10)
    holdings.assign([0, 1])
    holdings.ack(taken(holdings, 0, 7))
    assert holdings.to_commit() == {0: 8}
    assert holdings.to_commit() == {}
    holdings.not_committed([0, 1, 2])
    assert holdings.to_commit() == {0: 8}


def test_a_partition_that_leaves_is_not_ours_but_what_was_begun_counts() -> None:
    holdings = InFlightOffsets(10)
    holdings.assign([0])
    begun, waits = taken(holdings, 0, 0), taken(holdings, 0, 1)
    assert holdings.holds(begun)
    left: list[int] = []
    leaving = Thread(target=lambda: left.append(holdings.wait_for_handovers([0], 20)))
    leaving.start()
    while holdings.can_deliver(waits):
        pass
    assert not holdings.holds(waits)
    assert holdings.add(0, 2) is None
    holdings.ack(begun)
    leaving.join(20)
    assert left == [0]
    assert holdings.to_commit([0]) == {0: 1}


def test_the_wait_for_what_was_begun_has_an_end() -> None:
    holdings = InFlightOffsets(10)
    holdings.assign([0])
    assert holdings.holds(taken(holdings, 0, 0))
    began = monotonic()
    assert holdings.wait_for_handovers([0, 9], 0.05) == 1
    assert 0.04 < monotonic() - began < 5


def test_room_is_waited_for() -> None:
    holdings = InFlightOffsets(1)
    holdings.assign([0])
    held = taken(holdings, 0, 0)
    assert not holdings.wait_for_capacity(0.01)
    Thread(target=holdings.ack, args=(held,)).start()
    assert holdings.wait_for_capacity(20)


def test_who_waits_for_room_is_woken_when_there_is_plenty() -> None:
    """A message at a time would cost a switch of threads for each; but little room is room, when the time is over."""
    holdings = InFlightOffsets(8)
    holdings.assign([0])
    held = [taken(holdings, 0, offset) for offset in range(8)]
    holdings.ack(held[0])
    began = monotonic()
    assert holdings.wait_for_capacity(0.05)
    assert monotonic() - began > 0.04
    Thread(target=holdings.ack, args=(held[1],)).start()
    began = monotonic()
    assert holdings.wait_for_capacity(20)
    assert monotonic() - began < 10


def test_another_consumers_message_is_not_ours() -> None:
    one, other = InFlightOffsets(5), InFlightOffsets(5)
    one.assign([0])
    other.assign([0])
    theirs, ours = taken(one, 0, 0), taken(other, 0, 0)
    other.ack(theirs)
    assert other.redeliver(theirs) is None
    assert other.holds(ours)


async def test_nothing_of_a_partition_that_is_gone_is_delivered() -> None:
    adapter = KafkaAdapter(KafkaConfig(bootstrap_servers="127.0.0.1:1"), "t", "g")
    holdings = adapter._offsets
    holdings.assign([0, 1])
    batch = [taken(holdings, partition, offset) for offset in range(3) for partition in (0, 1)]
    adapter._on_messages(batch)
    stream = adapter.consume()
    assert await anext(stream) is batch[0]
    await adapter.nack(batch[0], requeue=True)
    holdings.revoke([0])
    holdings.assign([0])
    assert [(await anext(stream)).message_id for _ in range(3)] == ["t-1-0", "t-1-1", "t-1-2"]
    # What comes again is another delivery.
    adapter._on_messages([taken(holdings, 0, 0)])
    assert (await anext(stream)).message_id == "t-0-0"
    await adapter.close()
    assert [message async for message in stream] == []


def test_a_time_that_no_calendar_has_is_now() -> None:
    """Microseconds where milliseconds are meant, say: one such message must not end its consumer again and again."""
    assert timestamp_from_ms(1_763_247_000_000) == datetime(2025, 11, 15, 22, 50, tzinfo=UTC)
    for odd in (1_763_247_000_000_000, 2**63 - 1, -(2**63)):
        assert abs(timestamp_from_ms(odd) - datetime.now(UTC)) < timedelta(minutes=1)


def test_a_position_behind_markers_is_committed_once_nothing_before_it_is_in_flight() -> None:
    holdings = InFlightOffsets(10)
    holdings.assign([0])
    in_flight = taken(holdings, 0, 4)
    holdings.reach({0: 7, 1: 3})
    assert holdings.to_commit() == {0: 4}
    holdings.ack(in_flight)
    assert holdings.to_commit() == {0: 7}
    holdings.reach({0: 6})
    assert holdings.to_commit() == {}


def test_a_position_of_an_earlier_assignment_is_not_committed() -> None:
    holdings = InFlightOffsets(10)
    holdings.assign([0, 1], {0: 100, 1: 100})
    holdings.reach({0: 100, 1: 96})
    assert holdings.to_commit() == {1: 96}
    holdings.ack(taken(holdings, 0, 95))
    holdings.reach({0: 96})
    assert holdings.to_commit() == {0: 96}
