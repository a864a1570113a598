"""The outbox's store, the same on PostgreSQL, a SQLite file of its own and the engine's file."""

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
from tests.outbox.store_rig import ALL, Rig, Written
from tests.worker.support import eventually

WAITS = 3_600_000


@pytest.fixture(params=[pytest.param("postgres", marks=pytest.mark.postgres), "sqlite", "embedded"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    kind: str = request.param
    rig = Rig(kind, request.getfixturevalue("postgres_url") if kind == "postgres" else str(tmp_path / "outbox.db"))
    await rig.outbox.open()
    yield rig
    await rig.ledger.close()


def sent(event: OutboxEvent) -> PublishResult:
    return PublishResult(
        tenant_id=event.tenant_id, id=event.id, status=OutboxStatus.SENT, attempt_count=event.attempt_count + 1
    )


# Order ---------------------------------------------------------------------------------------------


async def test_events_come_in_the_order_in_which_they_were_written(rig: Rig) -> None:
    await rig.write(*(Written(id=f"e{number}", key=f"k{number % 3}") for number in range(9)), Written(id="free"))
    events = await rig.due_events()
    assert [event.id for event in events] == [*(f"e{number}" for number in range(9)), "free"]
    assert [event.position for event in events] == sorted(event.position for event in events)
    first = events[0]
    assert (first.key, first.topic, first.destination, first.tenant_id) == ("k0", "orders", "kafka", "default")
    assert (first.payload, first.headers, first.status) == ('{"n":1}', {"x-event-name": "paid"}, OutboxStatus.NEW)
    assert abs(first.created_at_ms - await rig.outbox.now_ms()) < 60_000
    assert events[-1].key == ""


async def test_the_limit_takes_the_first_of_every_key(rig: Rig) -> None:
    await rig.write(*(Written(id=f"e{number:03}", key=f"k{number % 40}") for number in range(200)))
    assert await rig.due(limit=50) == [f"e{number:03}" for number in range(50)]


async def test_a_batch_is_no_larger_than_memory_bears(rig: Rig) -> None:
    await rig.write(*[Written(id=f"e{number}", key=f"k{number % 2}") for number in range(6)])
    size = 7 * 1024 * 1024
    text = f"'\"' || {'repeat' if rig.kind == 'postgres' else 'printf'}"
    text += f"('x', {size})" if rig.kind == "postgres" else f"('%.*c', {size}, 'x')"
    # RETURNING: the rig reads what a statement gives.
    await rig.run(f"UPDATE outbox_events SET payload = {text} || '\"' RETURNING id")
    assert await rig.due() == ["e0", "e1", "e2"]
    await rig.run(f"UPDATE outbox_events SET payload = {text.replace(str(size), str(3 * size))} || '\"' RETURNING id")
    assert await rig.due() == ["e0"]


async def test_an_event_in_a_lane_that_nobody_looks_into_is_refused(rig: Rig) -> None:
    for lane in (-1, 64):
        with pytest.raises(Exception, match="known_lane"):
            await rig.run(
                "INSERT INTO outbox_events (id, destination, topic, lane, payload, created_at) "
                f"VALUES ('e', 'kafka', 't', {lane}, '1', {'now()' if rig.kind == 'postgres' else '1'}) RETURNING id"
            )


async def test_one_that_waits_for_its_next_try_holds_up_its_key_only(rig: Rig) -> None:
    await rig.write(
        Written(id="head", key="a", status=OutboxStatus.RETRYING, retry_in_ms=WAITS),
        Written(id="behind", key="a"),
        Written(id="other key", key="b"),
        Written(id="other topic", key="a", topic="bills"),
        Written(id="no key"),
        Written(id="waits", status=OutboxStatus.RETRYING, retry_in_ms=WAITS),
        Written(id="no key either"),
        Written(id="empty key", key=""),
    )
    assert await rig.due() == ["other key", "other topic", "no key", "no key either", "empty key"]


async def test_one_that_is_tried_again_goes_first_and_alone(rig: Rig) -> None:
    await rig.write(
        Written(id="head", key="a", status=OutboxStatus.RETRYING, retry_in_ms=-1, attempts=3),
        Written(id="next", key="a"),
    )
    (head,) = await rig.due_events()
    assert (head.id, head.status, head.attempt_count) == ("head", OutboxStatus.RETRYING, 3)
    assert await rig.outbox.record_results("me", [lane_of("kafka", "orders", "a", "")], [sent(head)])
    assert await rig.due() == ["next"]


async def test_one_of_two_that_are_retried_waits_for_the_other(rig: Rig) -> None:
    await rig.write(
        Written(id="first", key="a", status=OutboxStatus.RETRYING, retry_in_ms=WAITS),
        Written(id="second", key="a", status=OutboxStatus.RETRYING, retry_in_ms=-1),
    )
    assert await rig.due() == []
    assert await rig.outbox.next_due_ms(["kafka"]) == pytest.approx(await rig.outbox.now_ms() + WAITS, abs=60_000)


async def test_one_that_was_committed_late_goes_before_one_that_is_retried(rig: Rig) -> None:
    await rig.write(
        Written(id="late", key="a"), Written(id="tried", key="a", status=OutboxStatus.RETRYING, retry_in_ms=-1)
    )
    (late,) = await rig.due_events()
    assert late.id == "late"
    assert await rig.outbox.record_results("me", [lane_of("kafka", "orders", "a", "")], [sent(late)])
    assert await rig.due() == ["tried"]


async def test_a_dead_one_is_in_the_way_where_that_is_asked_for(rig: Rig) -> None:
    await rig.write(
        Written(id="dead", key="a", status=OutboxStatus.DEAD),
        Written(id="behind", key="a"),
        Written(id="free", key="b"),
    )
    assert await rig.due(dead_blocks=True) == ["free"]
    assert await rig.due() == ["behind", "free"]
    await rig.write(Written(id="retried", key="a", status=OutboxStatus.RETRYING, retry_in_ms=WAITS))
    assert await rig.outbox.next_due_ms(["kafka"], dead_blocks=True) is None
    assert await rig.outbox.next_due_ms(["kafka"]) is not None


async def test_other_destinations_are_somebody_elses(rig: Rig) -> None:
    await rig.write(*(Written(id=f"r{number}", key="a", destination="rabbit") for number in range(300)))
    assert await rig.due() == []
    await rig.write(Written(id="mine", key="a"))
    assert await rig.due() == ["mine"]
    await rig.write(Written(id="again", destination="sqs", status=OutboxStatus.RETRYING, retry_in_ms=WAITS))
    assert await rig.outbox.destinations() == ["kafka", "rabbit", "sqs"]


async def test_what_is_behind_many_that_wait_is_found(rig: Rig) -> None:
    """Others of the same lane, however long the line of a key that is held up."""
    lane = lane_of("kafka", "orders", "a", "")
    neighbours = [
        key for key in (f"k{number}" for number in range(4_000)) if lane_of("kafka", "orders", key, "") == lane
    ]
    await rig.write(
        Written(id="head", key="a", status=OutboxStatus.RETRYING, retry_in_ms=WAITS),
        *(Written(id=f"behind{number}", key="a") for number in range(3_000)),
        Written(id="stuck", key=neighbours[0], status=OutboxStatus.RETRYING, retry_in_ms=WAITS),
        *(Written(id=f"stuck{number}", key=neighbours[0]) for number in range(300)),
    )
    assert await rig.take() == [], "nothing is due, so that a relay has nothing to do"
    await rig.write(*(Written(id=f"n{number}", key=neighbours[1 + number % 3]) for number in range(200)))
    assert await rig.take() == [lane]
    assert await rig.due(limit=150) == [f"n{number}" for number in range(150)]


async def test_a_walk_over_very_many_keys_goes_on_where_it_ended(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("postgres", "sqlite"):
        monkeypatch.setattr(f"holdfast.ledger.{module}.outbox.STEPS", 10)
    lane = lane_of("kafka", "orders", "a", "")
    keys = [key for key in (f"k{number:05}" for number in range(9_000)) if lane_of("kafka", "orders", key, "") == lane]
    stuck, last = keys[:60], keys[60]
    await rig.write(
        *(Written(id=f"head {key}", key=key, status=OutboxStatus.RETRYING, retry_in_ms=WAITS) for key in stuck),
        *(Written(id=f"tail {key} {number}", key=key) for key in stuck for number in range(5)),
        Written(id="found", key=last),
    )
    found = [await rig.due() for _ in range(8)]
    assert ["found"] in found
    assert all(some in ([], ["found"]) for some in found)


# Lanes ---------------------------------------------------------------------------------------------


async def test_no_lane_is_taken_twice(rig: Rig) -> None:
    await rig.write(*(Written(id=f"e{number}", key=f"k{number}") for number in range(500)))
    mine, theirs = await rig.take("me", 32), await rig.take("you", 64)
    assert len(mine) == 32
    assert sorted(mine + theirs) == ALL
    assert await rig.take("third") == []
    assert await rig.outbox.due_events("third", ALL, ["kafka"], 100, dead_blocks=False) == []
    got = {lane_of("kafka", "orders", event.key, "") for event in await rig.due_events("me", 1_000)}
    assert got == set(mine)


async def test_relays_that_ask_at_the_same_moment_share(rig: Rig) -> None:
    await rig.write(*(Written(id=f"e{number}", key=f"k{number}") for number in range(500)))
    others = [rig.another() for _ in range(4)]
    try:
        shares = await asyncio.gather(
            *(other.outbox.acquire_lanes(f"r{number}", ["kafka"], 10, 60_000) for number, other in enumerate(others))
        )
    finally:
        for other in others:
            await other.close()
    lanes = [lane for share in shares for lane in share]
    assert len(lanes) == len(set(lanes)) == 40


async def test_a_lease_that_ran_out_is_taken_over_and_the_old_ones_mark_is_refused(rig: Rig) -> None:
    await rig.write(Written(id="e", key="k"))
    (lane,) = await rig.take("old", lease_ms=0)
    (event,) = await rig.due_events("new")
    assert await rig.outbox.record_results("old", [lane], [sent(event)]) is False
    assert await rig.status_of("e") is OutboxStatus.NEW
    assert await rig.outbox.record_results("new", [lane], [sent(event)]) is True
    assert await rig.status_of("e") is OutboxStatus.SENT


async def test_a_mark_writes_nothing_unless_all_lanes_are_ours(rig: Rig) -> None:
    await rig.write(*(Written(id=f"e{number}", key=f"k{number}") for number in range(200)))
    mine = await rig.take("me", 10)
    (theirs, *_) = await rig.take("you", 1)
    events = await rig.due_events("me", 5)
    assert not await rig.outbox.record_results("me", [*mine, theirs], [sent(event) for event in events])
    assert await rig.status_of(events[0].id) is OutboxStatus.NEW


async def test_a_lease_that_ran_out_unnoticed_is_no_longer_ours(rig: Rig) -> None:
    await rig.write(Written(id="e", key="k"))
    lanes = await rig.take("me", lease_ms=0)
    assert lanes
    assert await rig.outbox.due_events("me", lanes, ["kafka"], 10, dead_blocks=False) == []
    mark = PublishResult(tenant_id="default", id="e", status=OutboxStatus.SENT, attempt_count=1)
    assert not await rig.outbox.record_results("me", lanes, [mark])


async def test_a_mark_renews_the_lease(rig: Rig) -> None:
    await rig.write(Written(id="e", key="k"))
    (lane,) = await rig.take("me", lease_ms=60_000)
    before = await rig.run(f"SELECT lease_expires_at FROM outbox_lanes WHERE lane = {lane}")
    await asyncio.sleep(0.005)
    assert await rig.outbox.record_results("me", [lane], [])
    assert await rig.run(f"SELECT lease_expires_at FROM outbox_lanes WHERE lane = {lane}") > before


async def test_who_has_waited_longest_is_next(rig: Rig) -> None:
    await rig.write(*(Written(id=f"e{number}", key=f"k{number}") for number in range(500)))
    served: list[int] = []
    for _ in range(8):
        lanes = await rig.take("me", 8)
        await rig.outbox.release_lanes("me")
        served += lanes
    assert sorted(served) == ALL, "nothing was marked, and still every lane had its turn"


async def test_some_lanes_are_given_back(rig: Rig) -> None:
    await rig.write(*(Written(id=f"e{number}", key=f"k{number}") for number in range(500)))
    await rig.take("me")
    await rig.outbox.release_lanes("me", [1, 2])
    assert await rig.take("you") == [1, 2]
    await rig.outbox.release_lanes("you")
    await rig.outbox.release_lanes("me")
    assert await rig.take("you") == ALL


async def test_lanes_with_nothing_due_are_left_alone(rig: Rig) -> None:
    assert await rig.take() == []
    await rig.write(
        Written(id="e", key="k", status=OutboxStatus.RETRYING, retry_in_ms=WAITS),
        Written(id="s", status=OutboxStatus.SENT),
    )
    assert await rig.take() == []
    assert len(await rig.run("SELECT lane FROM outbox_lanes")) == LANES


# Marks ---------------------------------------------------------------------------------------------


async def test_marks_are_written(rig: Rig) -> None:
    await rig.write(*(Written(id=name, key=name) for name in ("sent", "again", "dead")))
    lanes, now_ms = await rig.take(), await rig.outbox.now_ms()
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
    sent_one, again, dead = [await rig.outbox.get("default", name) for name in ("sent", "again", "dead")]
    assert sent_one is not None
    assert again is not None
    assert dead is not None
    assert (sent_one.status, sent_one.attempt_count, sent_one.last_error) == (OutboxStatus.SENT, 4, "")
    assert sent_one.sent_at_ms == pytest.approx(now_ms, abs=60_000)
    assert (again.status, again.next_retry_at_ms, again.last_error) == (
        OutboxStatus.RETRYING,
        now_ms + 5_000,
        "no \ufffd answer",
    )
    assert (dead.status, dead.sent_at_ms, dead.last_error) == (OutboxStatus.DEAD, None, "too large")
    assert await rig.outbox.next_due_ms(["kafka"]) == now_ms + 5_000
    assert await rig.outbox.next_due_ms(["rabbit"]) is None


async def test_what_was_sent_stays_sent(rig: Rig) -> None:
    await rig.write(Written(id="e", key="k"))
    (event,) = await rig.due_events()
    lanes = [lane_of("kafka", "orders", "k", "")]
    assert await rig.outbox.record_results("me", lanes, [sent(event)])
    late = PublishResult(tenant_id="default", id="e", status=OutboxStatus.RETRYING, attempt_count=2, next_retry_at_ms=1)
    assert await rig.outbox.record_results("me", lanes, [late])
    assert await rig.status_of("e") is OutboxStatus.SENT
    assert await rig.due() == []


# Waking --------------------------------------------------------------------------------------------


async def test_whoever_writes_wakes_the_relay(rig: Rig) -> None:
    await rig.take()
    waiting = asyncio.create_task(_news(rig))
    await rig.write(Written(id="e", key="k"))
    async with asyncio.timeout(5):
        await waiting
    assert await rig.due() == ["e"]


async def _news(rig: Rig) -> None:
    while not await rig.take():
        await rig.outbox.wait_for_events(60)


async def test_what_was_written_while_nobody_waited_is_news(rig: Rig) -> None:
    await rig.take()
    # PostgreSQL: until it listens.
    await rig.outbox.wait_for_events(1)
    await rig.write(Written(id="e", key="k"))
    async with asyncio.timeout(4):
        await rig.outbox.wait_for_events(60)


@pytest.mark.postgres
async def test_a_listener_that_was_cut_off_listens_again(postgres_url: str) -> None:
    rig = Rig("postgres", postgres_url)
    listeners = "FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN %'"
    try:
        await rig.take()
        ((first,),) = await eventually(lambda: rig.run(f"SELECT pid {listeners}"), "a listener")
        await rig.run(f"SELECT pg_terminate_backend(pid) {listeners}")
        await eventually(lambda: rig.run(f"SELECT pid {listeners} AND pid <> {first}"), "a new listener")
        # It wakes everybody when it begins, since something may have been missed.
        await rig.outbox.wait_for_events(4)
        await rig.write(Written(id="e", key="k"))
        async with asyncio.timeout(4):
            await rig.outbox.wait_for_events(60)
    finally:
        await rig.ledger.close()


async def test_waiting_comes_to_an_end(rig: Rig) -> None:
    await rig.outbox.wait_for_events(0.01)
    await rig.outbox.wait_for_events(0.01)
    await rig.outbox.close()
    await rig.outbox.close()
    await rig.outbox.open()
    await rig.outbox.wait_for_events(0.01)


# What people see and do ----------------------------------------------------------------------------


async def test_the_backlog(rig: Rig) -> None:
    assert await rig.outbox.backlog() == OutboxBacklog(0, 0, None)
    await rig.write(
        Written(id="new", age_ms=5_000),
        Written(id="again", status=OutboxStatus.RETRYING, age_ms=60_000),
        Written(id="dead", status=OutboxStatus.DEAD, age_ms=90_000),
        Written(id="sent", status=OutboxStatus.SENT, age_ms=90_000),
    )
    backlog = await rig.outbox.backlog()
    assert (backlog.waiting, backlog.dead) == (2, 1)
    assert backlog.oldest_ms == pytest.approx(await rig.outbox.now_ms() - 60_000, abs=30_000)


async def test_events_are_found(rig: Rig) -> None:
    await rig.write(
        Written(id="1", key="a"),
        Written(id="2", key="b", tenant_id="acme", status=OutboxStatus.DEAD),
        Written(id="3", key="a", topic="bills"),
        Written(id="4", key="a", destination="rabbit"),
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


async def test_a_revived_event_has_all_its_attempts_again(rig: Rig) -> None:
    await rig.write(
        Written(id="dead", key="a", status=OutboxStatus.DEAD, attempts=9),
        Written(id="again", key="b", status=OutboxStatus.RETRYING, retry_in_ms=WAITS, attempts=3),
        Written(id="acme's", key="c", status=OutboxStatus.DEAD, tenant_id="acme"),
        Written(id="sent", key="d", status=OutboxStatus.SENT),
        Written(id="new", key="e", attempts=1),
    )
    assert (
        await rig.outbox.retry_events(["default"], ["dead", "again", "acme's", "sent", "new", "none"], "ann", "mended")
        == 2
    )
    revived = {event.id: event for event in await rig.due_events()}
    assert revived.keys() == {"dead", "again", "new"}
    assert revived["dead"].attempt_count == revived["again"].attempt_count == 0
    assert revived["new"].attempt_count == 1
    (entry,) = (await rig.ledger.queries.audit_log(AuditFilter())).entries
    assert (entry.type, entry.actor, entry.reason, entry.target) == ("operator.outbox_retry", "ann", "mended", "outbox")
    assert entry.after is not None
    assert msgspec.json.decode(entry.after.text) == {"events": 2, "ids": ["again", "dead"]}
    assert await rig.outbox.retry_events(None, ["sent"], "ann", "") == 0
    assert await rig.outbox.retry_events(None, ["acme's"], "bob", "") == 1
    assert len((await rig.ledger.queries.audit_log(AuditFilter())).entries) == 2


async def test_only_old_sent_events_are_pruned(rig: Rig) -> None:
    old = 10_000_000
    await rig.write(
        *(Written(id=f"sent{number}", status=OutboxStatus.SENT, age_ms=old) for number in range(5)),
        Written(id="fresh", status=OutboxStatus.SENT),
        *(
            Written(id=str(status), status=status, age_ms=old)
            for status in OutboxStatus
            if status is not OutboxStatus.SENT
        ),
    )
    assert await rig.outbox.prune(1_000_000, 3) == 3
    assert await rig.outbox.prune(1_000_000, 3) == 2
    assert await rig.outbox.prune(1_000_000, 3) == 0
    assert {event.id for event in await rig.outbox.find(None)} == {"fresh", "NEW", "RETRYING", "DEAD"}


async def test_rows_of_other_programs_are_read(rig: Rig) -> None:
    """Headers that are no object of texts do not stop a relay."""
    lane = lane_of("kafka", "orders", None, "x")
    rows: list[tuple[Any, ...]] = [
        ("default", str(number), "kafka", "orders", None, lane, "{}", headers, "NEW", 0, None, 1_000, None)
        for number, headers in enumerate([None, "", "nonsense", "[" * 100_000, '{"a": 1, "b": "two"}'])
    ]
    await rig.insert(rows)
    events = await rig.due_events()
    assert [event.headers for event in events] == [{}, {}, {}, {}, {"a": "1", "b": "two"}]
