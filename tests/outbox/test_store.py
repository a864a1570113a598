"""The outbox store behaves the same on PostgreSQL, in a separate SQLite file and in the engine's file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.core.publishing import LANES, lane_of
from holdfast.ledger.port.messages import OutboxBacklog, OutboxEvent, OutboxStatus, PublishResult
from holdfast.ledger.queries.operator_filters import AuditFilter
from tests.outbox.store_rig import ALL_LANES, EventRow, Rig
from tests.worker.support import eventually

LATER_MS = 3_600_000


@pytest.fixture(params=[pytest.param("postgres", marks=pytest.mark.postgres), "sqlite", "embedded"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    kind: str = request.param
    rig = Rig(kind, request.getfixturevalue("postgres_url") if kind == "postgres" else str(tmp_path / "outbox.db"))
    await rig.outbox.open()
    yield rig
    await rig.ledger.close()


def sent_result(event: OutboxEvent) -> PublishResult:
    return PublishResult(
        tenant_id=event.tenant_id, id=event.id, status=OutboxStatus.SENT, attempt_count=event.attempt_count + 1
    )


# Order ---------------------------------------------------------------------------------------------


async def test_events_are_returned_in_the_order_in_which_they_were_written(rig: Rig) -> None:
    await rig.write(*(EventRow(id=f"e{number}", key=f"k{number % 3}") for number in range(9)), EventRow(id="free"))
    events = await rig.due_events()
    assert [event.id for event in events] == [*(f"e{number}" for number in range(9)), "free"]
    assert [event.position for event in events] == sorted(event.position for event in events)
    first = events[0]
    assert (first.key, first.topic, first.destination, first.tenant_id) == ("k0", "orders", "kafka", "default")
    assert (first.payload, first.headers, first.status) == ('{"n":1}', {"x-event-name": "paid"}, OutboxStatus.NEW)
    assert abs(first.created_at_ms - await rig.outbox.now_ms()) < 60_000
    assert events[-1].key == ""


async def test_a_limit_returns_the_oldest_events(rig: Rig) -> None:
    await rig.write(*(EventRow(id=f"e{number:03}", key=f"k{number % 40}") for number in range(200)))
    assert await rig.due_ids(limit=50) == [f"e{number:03}" for number in range(50)]


async def test_the_size_of_a_batch_is_limited_in_bytes(rig: Rig) -> None:
    await rig.write(*[EventRow(id=f"e{number}", key=f"k{number % 2}") for number in range(6)])
    size = 7 * 1024 * 1024
    text = f"'\"' || {'repeat' if rig.kind == 'postgres' else 'printf'}"
    text += f"('x', {size})" if rig.kind == "postgres" else f"('%.*c', {size}, 'x')"
    # With RETURNING, since the rig fetches rows of every statement.
    await rig.run(f"UPDATE outbox_events SET payload = {text} || '\"' RETURNING id")
    assert await rig.due_ids() == ["e0", "e1", "e2"]
    await rig.run(f"UPDATE outbox_events SET payload = {text.replace(str(size), str(3 * size))} || '\"' RETURNING id")
    assert await rig.due_ids() == ["e0"]


async def test_an_event_in_an_unknown_lane_is_refused(rig: Rig) -> None:
    for lane in (-1, 64):
        with pytest.raises(Exception, match="known_lane"):
            await rig.run(
                "INSERT INTO outbox_events (id, destination, topic, lane, payload, created_at) "
                f"VALUES ('e', 'kafka', 't', {lane}, '1', {'now()' if rig.kind == 'postgres' else '1'}) RETURNING id"
            )


async def test_an_event_waiting_for_its_retry_blocks_only_its_key(rig: Rig) -> None:
    await rig.write(
        EventRow(id="head", key="a", status=OutboxStatus.RETRYING, retry_in_ms=LATER_MS),
        EventRow(id="behind", key="a"),
        EventRow(id="other key", key="b"),
        EventRow(id="other topic", key="a", topic="bills"),
        EventRow(id="no key"),
        EventRow(id="waits", status=OutboxStatus.RETRYING, retry_in_ms=LATER_MS),
        EventRow(id="no key either"),
        EventRow(id="empty key", key=""),
    )
    assert await rig.due_ids() == ["other key", "other topic", "no key", "no key either", "empty key"]


async def test_a_retried_event_is_returned_first_and_alone(rig: Rig) -> None:
    await rig.write(
        EventRow(id="head", key="a", status=OutboxStatus.RETRYING, retry_in_ms=-1, attempts=3),
        EventRow(id="next", key="a"),
    )
    (head,) = await rig.due_events()
    assert (head.id, head.status, head.attempt_count) == ("head", OutboxStatus.RETRYING, 3)
    assert await rig.outbox.record_results("me", [lane_of("kafka", "orders", "a", "")], [sent_result(head)])
    assert await rig.due_ids() == ["next"]


async def test_the_second_of_two_retried_events_waits_for_the_first(rig: Rig) -> None:
    await rig.write(
        EventRow(id="first", key="a", status=OutboxStatus.RETRYING, retry_in_ms=LATER_MS),
        EventRow(id="second", key="a", status=OutboxStatus.RETRYING, retry_in_ms=-1),
    )
    assert await rig.due_ids() == []
    assert await rig.outbox.next_due_ms(["kafka"]) == pytest.approx(await rig.outbox.now_ms() + LATER_MS, abs=60_000)


async def test_an_event_committed_late_is_returned_before_a_retried_one(rig: Rig) -> None:
    await rig.write(
        EventRow(id="late", key="a"), EventRow(id="tried", key="a", status=OutboxStatus.RETRYING, retry_in_ms=-1)
    )
    (late,) = await rig.due_events()
    assert late.id == "late"
    assert await rig.outbox.record_results("me", [lane_of("kafka", "orders", "a", "")], [sent_result(late)])
    assert await rig.due_ids() == ["tried"]


async def test_a_dead_event_blocks_its_key_if_requested(rig: Rig) -> None:
    await rig.write(
        EventRow(id="dead", key="a", status=OutboxStatus.DEAD),
        EventRow(id="behind", key="a"),
        EventRow(id="free", key="b"),
    )
    assert await rig.due_ids(dead_blocks=True) == ["free"]
    assert await rig.due_ids() == ["behind", "free"]
    await rig.write(EventRow(id="retried", key="a", status=OutboxStatus.RETRYING, retry_in_ms=LATER_MS))
    assert await rig.outbox.next_due_ms(["kafka"], dead_blocks=True) is None
    assert await rig.outbox.next_due_ms(["kafka"]) is not None


async def test_events_of_other_destinations_are_not_returned(rig: Rig) -> None:
    await rig.write(*(EventRow(id=f"r{number}", key="a", destination="rabbit") for number in range(300)))
    assert await rig.due_ids() == []
    await rig.write(EventRow(id="mine", key="a"))
    assert await rig.due_ids() == ["mine"]
    await rig.write(EventRow(id="again", destination="sqs", status=OutboxStatus.RETRYING, retry_in_ms=LATER_MS))
    assert await rig.outbox.destinations() == ["kafka", "rabbit", "sqs"]


async def test_due_events_behind_many_waiting_ones_are_found(rig: Rig) -> None:
    """Events of other keys in the same lane, however many wait behind a blocked key."""
    lane = lane_of("kafka", "orders", "a", "")
    neighbours = [
        key for key in (f"k{number}" for number in range(4_000)) if lane_of("kafka", "orders", key, "") == lane
    ]
    await rig.write(
        EventRow(id="head", key="a", status=OutboxStatus.RETRYING, retry_in_ms=LATER_MS),
        *(EventRow(id=f"behind{number}", key="a") for number in range(3_000)),
        EventRow(id="stuck", key=neighbours[0], status=OutboxStatus.RETRYING, retry_in_ms=LATER_MS),
        *(EventRow(id=f"stuck{number}", key=neighbours[0]) for number in range(300)),
    )
    assert await rig.acquire_lanes() == [], "nothing is due, so no lane is acquired"
    await rig.write(*(EventRow(id=f"n{number}", key=neighbours[1 + number % 3]) for number in range(200)))
    assert await rig.acquire_lanes() == [lane]
    assert await rig.due_ids(limit=150) == [f"n{number}" for number in range(150)]


async def test_a_walk_over_many_keys_continues_where_it_ended(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("postgres", "sqlite"):
        monkeypatch.setattr(f"holdfast.ledger.{module}.outbox.STEPS", 10)
    lane = lane_of("kafka", "orders", "a", "")
    keys = [key for key in (f"k{number:05}" for number in range(9_000)) if lane_of("kafka", "orders", key, "") == lane]
    stuck, last = keys[:60], keys[60]
    await rig.write(
        *(EventRow(id=f"head {key}", key=key, status=OutboxStatus.RETRYING, retry_in_ms=LATER_MS) for key in stuck),
        *(EventRow(id=f"tail {key} {number}", key=key) for key in stuck for number in range(5)),
        EventRow(id="found", key=last),
    )
    found = [await rig.due_ids() for _ in range(8)]
    assert ["found"] in found
    assert all(batch in ([], ["found"]) for batch in found)


# Lanes ---------------------------------------------------------------------------------------------


async def test_no_lane_is_acquired_twice(rig: Rig) -> None:
    await rig.write(*(EventRow(id=f"e{number}", key=f"k{number}") for number in range(500)))
    mine, theirs = await rig.acquire_lanes("me", 32), await rig.acquire_lanes("you", 64)
    assert len(mine) == 32
    assert sorted(mine + theirs) == ALL_LANES
    assert await rig.acquire_lanes("third") == []
    assert await rig.outbox.due_events("third", ALL_LANES, ["kafka"], 100, dead_blocks=False) == []
    lanes_read = {lane_of("kafka", "orders", event.key, "") for event in await rig.due_events("me", 1_000)}
    assert lanes_read == set(mine)


async def test_concurrent_relays_acquire_different_lanes(rig: Rig) -> None:
    await rig.write(*(EventRow(id=f"e{number}", key=f"k{number}") for number in range(500)))
    others = [rig.new_ledger() for _ in range(4)]
    try:
        shares = await asyncio.gather(
            *(other.outbox.acquire_lanes(f"r{number}", ["kafka"], 10, 60_000) for number, other in enumerate(others))
        )
    finally:
        for other in others:
            await other.close()
    lanes = [lane for share in shares for lane in share]
    assert len(lanes) == len(set(lanes)) == 40


async def test_an_expired_lease_is_reclaimed_and_stale_results_are_refused(rig: Rig) -> None:
    await rig.write(EventRow(id="e", key="k"))
    (lane,) = await rig.acquire_lanes("old", lease_ms=0)
    (event,) = await rig.due_events("new")
    assert await rig.outbox.record_results("old", [lane], [sent_result(event)]) is False
    assert await rig.get_status("e") is OutboxStatus.NEW
    assert await rig.outbox.record_results("new", [lane], [sent_result(event)]) is True
    assert await rig.get_status("e") is OutboxStatus.SENT


async def test_results_are_refused_unless_the_relay_holds_all_lanes(rig: Rig) -> None:
    await rig.write(*(EventRow(id=f"e{number}", key=f"k{number}") for number in range(200)))
    mine = await rig.acquire_lanes("me", 10)
    (theirs, *_) = await rig.acquire_lanes("you", 1)
    events = await rig.due_events("me", 5)
    assert not await rig.outbox.record_results("me", [*mine, theirs], [sent_result(event) for event in events])
    assert await rig.get_status(events[0].id) is OutboxStatus.NEW


async def test_an_expired_lease_is_not_valid_even_if_not_reclaimed(rig: Rig) -> None:
    await rig.write(EventRow(id="e", key="k"))
    lanes = await rig.acquire_lanes("me", lease_ms=0)
    assert lanes
    assert await rig.outbox.due_events("me", lanes, ["kafka"], 10, dead_blocks=False) == []
    result = PublishResult(tenant_id="default", id="e", status=OutboxStatus.SENT, attempt_count=1)
    assert not await rig.outbox.record_results("me", lanes, [result])


async def test_recording_results_renews_the_lease(rig: Rig) -> None:
    await rig.write(EventRow(id="e", key="k"))
    (lane,) = await rig.acquire_lanes("me", lease_ms=60_000)
    before = await rig.run(f"SELECT lease_expires_at FROM outbox_lanes WHERE lane = {lane}")
    await asyncio.sleep(0.005)
    assert await rig.outbox.record_results("me", [lane], [])
    assert await rig.run(f"SELECT lease_expires_at FROM outbox_lanes WHERE lane = {lane}") > before


async def test_the_lane_that_waited_longest_is_acquired_next(rig: Rig) -> None:
    await rig.write(*(EventRow(id=f"e{number}", key=f"k{number}") for number in range(500)))
    acquired: list[int] = []
    for _ in range(8):
        lanes = await rig.acquire_lanes("me", 8)
        await rig.outbox.release_lanes("me")
        acquired += lanes
    assert sorted(acquired) == ALL_LANES, "no result was recorded, and still every lane was acquired"


async def test_some_lanes_are_released(rig: Rig) -> None:
    await rig.write(*(EventRow(id=f"e{number}", key=f"k{number}") for number in range(500)))
    await rig.acquire_lanes("me")
    await rig.outbox.release_lanes("me", [1, 2])
    assert await rig.acquire_lanes("you") == [1, 2]
    await rig.outbox.release_lanes("you")
    await rig.outbox.release_lanes("me")
    assert await rig.acquire_lanes("you") == ALL_LANES


async def test_lanes_with_nothing_due_are_not_acquired(rig: Rig) -> None:
    assert await rig.acquire_lanes() == []
    await rig.write(
        EventRow(id="e", key="k", status=OutboxStatus.RETRYING, retry_in_ms=LATER_MS),
        EventRow(id="s", status=OutboxStatus.SENT),
    )
    assert await rig.acquire_lanes() == []
    assert len(await rig.run("SELECT lane FROM outbox_lanes")) == LANES


# Results -------------------------------------------------------------------------------------------


async def test_results_are_recorded(rig: Rig) -> None:
    await rig.write(*(EventRow(id=name, key=name) for name in ("sent", "again", "dead")))
    lanes, now_ms = await rig.acquire_lanes(), await rig.outbox.now_ms()
    common: dict[str, Any] = {"tenant_id": "default", "attempt_count": 4}
    assert await rig.outbox.record_results(
        "me",
        lanes,
        [
            PublishResult(id="sent", status=OutboxStatus.SENT, **common),
            PublishResult(
                id="again",
                status=OutboxStatus.RETRYING,
                next_retry_at_ms=now_ms + 5_000,
                last_error="no \0 answer",
                **common,
            ),
            PublishResult(id="dead", status=OutboxStatus.DEAD, last_error="too large", **common),
        ],
    )
    sent, retried, dead = [await rig.outbox.get("default", name) for name in ("sent", "again", "dead")]
    assert sent is not None
    assert retried is not None
    assert dead is not None
    assert (sent.status, sent.attempt_count, sent.last_error) == (OutboxStatus.SENT, 4, "")
    assert sent.sent_at_ms == pytest.approx(now_ms, abs=60_000)
    assert (retried.status, retried.next_retry_at_ms, retried.last_error) == (
        OutboxStatus.RETRYING,
        now_ms + 5_000,
        "no \ufffd answer",
    )
    assert (dead.status, dead.sent_at_ms, dead.last_error) == (OutboxStatus.DEAD, None, "too large")
    assert await rig.outbox.next_due_ms(["kafka"]) == now_ms + 5_000
    assert await rig.outbox.next_due_ms(["rabbit"]) is None


async def test_a_sent_event_stays_sent(rig: Rig) -> None:
    await rig.write(EventRow(id="e", key="k"))
    (event,) = await rig.due_events()
    lanes = [lane_of("kafka", "orders", "k", "")]
    assert await rig.outbox.record_results("me", lanes, [sent_result(event)])
    late = PublishResult(tenant_id="default", id="e", status=OutboxStatus.RETRYING, attempt_count=2, next_retry_at_ms=1)
    assert await rig.outbox.record_results("me", lanes, [late])
    assert await rig.get_status("e") is OutboxStatus.SENT
    assert await rig.due_ids() == []


# Waking --------------------------------------------------------------------------------------------


async def test_a_write_wakes_the_relay(rig: Rig) -> None:
    await rig.acquire_lanes()
    waiting = asyncio.create_task(_acquire_when_notified(rig))
    await rig.write(EventRow(id="e", key="k"))
    async with asyncio.timeout(5):
        await waiting
    assert await rig.due_ids() == ["e"]


async def _acquire_when_notified(rig: Rig) -> None:
    while not await rig.acquire_lanes():
        await rig.outbox.wait_for_events(60)


async def test_a_write_without_a_waiter_wakes_the_next_waiter(rig: Rig) -> None:
    await rig.acquire_lanes()
    # On PostgreSQL, wait until it listens.
    await rig.outbox.wait_for_events(1)
    await rig.write(EventRow(id="e", key="k"))
    async with asyncio.timeout(4):
        await rig.outbox.wait_for_events(60)


@pytest.mark.postgres
async def test_a_disconnected_listener_listens_again(postgres_url: str) -> None:
    rig = Rig("postgres", postgres_url)
    listeners = "FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN %'"
    try:
        await rig.acquire_lanes()
        ((first,),) = await eventually(lambda: rig.run(f"SELECT pid {listeners}"), "a listener")
        await rig.run(f"SELECT pg_terminate_backend(pid) {listeners}")
        await eventually(lambda: rig.run(f"SELECT pid {listeners} AND pid <> {first}"), "a new listener")
        # It wakes all waiters when it starts, since a notification may have been missed.
        await rig.outbox.wait_for_events(4)
        await rig.write(EventRow(id="e", key="k"))
        async with asyncio.timeout(4):
            await rig.outbox.wait_for_events(60)
    finally:
        await rig.ledger.close()


async def test_waiting_ends_at_the_timeout(rig: Rig) -> None:
    await rig.outbox.wait_for_events(0.01)
    await rig.outbox.wait_for_events(0.01)
    await rig.outbox.close()
    await rig.outbox.close()
    await rig.outbox.open()
    await rig.outbox.wait_for_events(0.01)


# Operator queries and retries -----------------------------------------------------------------------


async def test_the_backlog(rig: Rig) -> None:
    assert await rig.outbox.backlog() == OutboxBacklog(0, 0, None)
    await rig.write(
        EventRow(id="new", age_ms=5_000),
        EventRow(id="again", status=OutboxStatus.RETRYING, age_ms=60_000),
        EventRow(id="dead", status=OutboxStatus.DEAD, age_ms=90_000),
        EventRow(id="sent", status=OutboxStatus.SENT, age_ms=90_000),
    )
    backlog = await rig.outbox.backlog()
    assert (backlog.waiting, backlog.dead) == (2, 1)
    assert backlog.oldest_ms == pytest.approx(await rig.outbox.now_ms() - 60_000, abs=30_000)


async def test_events_are_found(rig: Rig) -> None:
    await rig.write(
        EventRow(id="1", key="a"),
        EventRow(id="2", key="b", tenant_id="acme", status=OutboxStatus.DEAD),
        EventRow(id="3", key="a", topic="bills"),
        EventRow(id="4", key="a", destination="rabbit"),
    )

    async def ids(tenants: list[str] | None = None, **filters: Any) -> list[str]:
        return [event.id for event in await rig.outbox.find(tenants, **filters)]

    assert await ids() == ["4", "3", "2", "1"]
    assert await ids(["acme"]) == ["2"]
    assert await ids([]) == []
    assert await ids(["default"], key="a", topic="orders") == ["4", "1"]
    assert await ids(destination="rabbit") == ["4"]
    assert await ids(status=OutboxStatus.DEAD) == ["2"]
    (third,) = await rig.outbox.find(None, topic="bills")
    assert await ids(after=third.position, limit=1) == ["2"]
    assert await rig.outbox.get("default", "2") is None
    assert await rig.outbox.get("acme", "2") is not None


async def test_a_retried_event_has_all_its_attempts_again(rig: Rig) -> None:
    await rig.write(
        EventRow(id="dead", key="a", status=OutboxStatus.DEAD, attempts=9),
        EventRow(id="again", key="b", status=OutboxStatus.RETRYING, retry_in_ms=LATER_MS, attempts=3),
        EventRow(id="acme's", key="c", status=OutboxStatus.DEAD, tenant_id="acme"),
        EventRow(id="sent", key="d", status=OutboxStatus.SENT),
        EventRow(id="new", key="e", attempts=1),
    )
    assert (
        await rig.outbox.retry_events(
            ["default"], ["dead", "again", "acme's", "sent", "new", "none"], "ann", "repaired"
        )
        == 2
    )
    revived = {event.id: event for event in await rig.due_events()}
    assert revived.keys() == {"dead", "again", "new"}
    assert revived["dead"].attempt_count == revived["again"].attempt_count == 0
    assert revived["new"].attempt_count == 1
    (entry,) = (await rig.ledger.queries.audit_log(AuditFilter())).entries
    assert (entry.type, entry.actor, entry.reason, entry.target) == (
        "operator.outbox_retry",
        "ann",
        "repaired",
        "outbox",
    )
    assert entry.after is not None
    assert msgspec.json.decode(entry.after.text) == {"events": 2, "ids": ["again", "dead"]}
    assert await rig.outbox.retry_events(None, ["sent"], "ann", "") == 0
    assert await rig.outbox.retry_events(None, ["acme's"], "bob", "") == 1
    assert len((await rig.ledger.queries.audit_log(AuditFilter())).entries) == 2


async def test_only_old_sent_events_are_pruned(rig: Rig) -> None:
    old = 10_000_000
    await rig.write(
        *(EventRow(id=f"sent{number}", status=OutboxStatus.SENT, age_ms=old) for number in range(5)),
        EventRow(id="fresh", status=OutboxStatus.SENT),
        *(
            EventRow(id=str(status), status=status, age_ms=old)
            for status in OutboxStatus
            if status is not OutboxStatus.SENT
        ),
    )
    assert await rig.outbox.prune(1_000_000, 3) == 3
    assert await rig.outbox.prune(1_000_000, 3) == 2
    assert await rig.outbox.prune(1_000_000, 3) == 0
    assert {event.id for event in await rig.outbox.find(None)} == {"fresh", "NEW", "RETRYING", "DEAD"}


async def test_rows_of_other_programs_are_read(rig: Rig) -> None:
    """Headers that are not an object of strings do not stop a relay."""
    lane = lane_of("kafka", "orders", None, "x")
    rows: list[tuple[Any, ...]] = [
        ("default", str(number), "kafka", "orders", None, lane, "{}", headers, "NEW", 0, None, 1_000, None)
        for number, headers in enumerate([None, "", "nonsense", "[" * 100_000, '{"a": 1, "b": "two"}'])
    ]
    await rig.insert(rows)
    events = await rig.due_events()
    assert [event.headers for event in events] == [{}, {}, {}, {}, {"a": "1", "b": "two"}]
