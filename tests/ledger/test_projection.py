"""Projection on both stores: the rows that a batch of events leaves (rules 14–18)."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from holdfast.core.job import Event, JobKey
from holdfast.core.states import DUPLICATE_EVENT, FORKED_EVENT, HEARTBEAT_EVENT, State
from holdfast.engine.port.feed import FeedEntry
from holdfast.ledger.fold import AFTER_THE_END, CREATED_AGAIN, FORKED, UNKNOWN_JOB
from holdfast.ledger.port.ledger import FeedPosition, Ledger, PositionMoved, RecordedDeadLetter
from holdfast.ledger.queries.job_list import JobFilter
from tests.ledger.projection_rig import (
    QUEUE,
    Feed,
    FeedWriter,
    check_ledger,
    decode,
    event_types,
    job,
    open_ledger,
    rows,
)

_S = State


@pytest.fixture
def writer(ledger: Ledger) -> FeedWriter:
    return FeedWriter(ledger)


# Histories -----------------------------------------------------------------------------------------


async def test_a_complete_history_in_one_batch(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    await writer.write(feed.entry(*feed.life("j1")))
    assert await event_types(ledger, "j1") == ["task.created", "task.claimed", "task.succeeded"]
    row = await job(ledger, "j1")
    assert (row["state"], row["last_seq"], row["attempt"], row["result"]) == ("succeeded", 3, 1, "3")
    assert (row["job_type"], row["payload"], row["trace_id"]) == ("add", '{"a": 1, "b":2.0}', "t-1")
    assert row["worker"] is None
    assert row["finished_at"] == row["updated_at"] > row["created_at"]


async def test_a_history_in_many_batches_equals_one_in_one_batch(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    for event in feed.life("j1"):
        await writer.write(feed.entry(event))
    assert await event_types(ledger, "j1") == ["task.created", "task.claimed", "task.succeeded"]
    row = await job(ledger, "j1")
    assert (row["state"], row["last_seq"], row["attempt"], row["result"]) == ("succeeded", 3, 1, "3")


async def test_a_running_job_names_its_worker_and_keeps_its_last_error(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    await writer.write(feed.entry(feed.created("j1"), feed.claimed("j1")))
    await writer.write(feed.entry(feed.failed("j1", _S.RETRYING)))
    row = await job(ledger, "j1")
    assert (row["state"], row["retry_count"], row["error_code"]) == ("retrying", 1, "TASK_ERROR")
    assert row["last_error"] == "ValueError: boom 1"
    assert "boom" not in row["error_message"]
    assert row["next_retry_at"] is not None
    await writer.write(feed.entry(feed.claimed("j1", 2, 1, was=_S.RETRYING)))
    row = await job(ledger, "j1")
    assert (row["state"], row["worker"], row["last_error"]) == ("running", "w2", "ValueError: boom 1")
    assert row["next_retry_at"] is None
    await writer.write(feed.entry(feed.succeeded("j1", 2, 1)))
    row = await job(ledger, "j1")
    assert (row["state"], row["worker"], row["last_error"], row["error_code"]) == ("succeeded", None, None, None)
    await check_ledger(ledger)


async def test_events_besides_moves_are_numbered_and_change_nothing(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    await writer.write(feed.entry(feed.created("j1"), feed.claimed("j1")))
    before = await job(ledger, "j1")
    heartbeat = feed.event("j1", None, None, 1, 0, type=HEARTBEAT_EVENT, worker="w1")
    await writer.write(feed.entry(heartbeat))
    assert await job(ledger, "j1") == before | {"last_seq": 3}
    copy = feed.event("j1", None, None, type=DUPLICATE_EVENT, data={"message_id": "1-1"})
    await writer.write(feed.entry(heartbeat, feed.succeeded("j1"), copy))
    await writer.write(feed.entry(copy))
    names = ["task.created", "task.claimed", "task.heartbeat", "task.heartbeat", "task.succeeded"]
    assert await event_types(ledger, "j1") == [*names, "task.duplicate", "task.duplicate"]
    assert not await rows(ledger, "SELECT * FROM anomalies")


async def test_tenants_with_the_same_job_id_are_two_jobs(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    await writer.write(feed.entry(feed.created("j1", tenant_id="a"), feed.created("j1", tenant_id="b")))
    await writer.write(feed.entry(feed.claimed("j1", tenant_id="a")))
    states = await rows(ledger, "SELECT tenant_id, state FROM jobs ORDER BY tenant_id")
    assert [(row["tenant_id"], row["state"]) for row in states] == [("a", "running"), ("b", "queued")]


async def test_random_histories_in_random_batches_are_complete(ledger: Ledger, writer: FeedWriter) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng, feed = random.Random(seed), Feed()
    histories = [_random_history(feed, f"j{number}", rng) for number in range(60)]
    expected = {events[0].job_id: [event.type for event in events] for events in histories}
    waiting = [events for events in histories if events]
    entries = []
    while waiting:
        batch = []
        for _ in range(rng.randint(1, 30)):
            if waiting:
                events = rng.choice(waiting)
                batch.append(events.pop(0))
                waiting = [events for events in waiting if events]
        entries.append(feed.entry(*batch))
    while entries:
        size = rng.randint(1, 4)
        done = await writer.write(*entries[:size])
        assert not done.slow_path
        entries = entries[size:]
    await check_ledger(ledger)
    for job_id, names in expected.items():
        assert await event_types(ledger, job_id) == names
    assert not await rows(ledger, "SELECT * FROM anomalies")


def _random_history(feed: Feed, job_id: str, rng: random.Random) -> list[Event]:
    events, attempt, retries, was = [feed.created(job_id)], 0, 0, _S.QUEUED
    while True:
        attempt += 1
        events.append(feed.claimed(job_id, attempt, retries, was=was))
        ending = rng.choice(["succeed", "retry", "fail", "lose"])
        if ending == "lose":
            attempt += 1
            events.append(feed.event(job_id, _S.RUNNING, _S.RUNNING, attempt, retries, worker="w9"))
        if ending == "retry":
            retries += 1
            events.append(feed.failed(job_id, _S.RETRYING, attempt, retries))
            was = _S.RETRYING
            continue
        if ending == "fail":
            events.append(feed.failed(job_id, _S.DLQ_PENDING, attempt, retries, dlq_id=f"d-{job_id}"))
            for was, to in ((_S.DLQ_PENDING, _S.DLQ_RECORDED), (_S.DLQ_RECORDED, _S.FAILED)):
                events.append(feed.event(job_id, was, to, attempt, retries, data={"dlq_id": f"d-{job_id}"}))
            return events
        events.append(feed.succeeded(job_id, attempt, retries))
        return events


# The position --------------------------------------------------------------------------------------


async def test_the_position_moves_with_the_rows_or_nothing_does(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    first, second = feed.entry(*feed.life("j1")), feed.entry(*feed.life("j2"))
    await writer.write(first)
    assert await writer.projection.position(QUEUE) == FeedPosition(first.position, first.nonce)
    late = FeedWriter(ledger)
    with pytest.raises(PositionMoved):
        await late.write(first, second)
    wrong = FeedWriter(ledger)
    wrong.at = FeedPosition(first.position, "another feed")
    with pytest.raises(PositionMoved):
        await wrong.write(second)
    assert await check_ledger(ledger) == {"j1": _S.SUCCEEDED}


async def test_concurrent_projectors_write_each_entry_once(ledger: Ledger, ledger_url: str) -> None:
    feed = Feed()
    entries = [feed.entry(*feed.life(f"j{number}")) for number in range(20)]
    others = [open_ledger(ledger_url) for _ in range(3)]
    try:
        done = await asyncio.gather(*(_race(FeedWriter(other), entries) for other in others))
    finally:
        for other in others:
            await other.close()
    assert sum(done) == len(entries)
    assert len(await check_ledger(ledger)) == len(entries)


async def _race(writer: FeedWriter, entries: list[FeedEntry]) -> int:
    written = 0
    while True:
        writer.at = await writer.projection.position(QUEUE)
        unread = [entry for entry in entries if entry.position > writer.at.position][:3]
        if not unread:
            return written
        try:
            await writer.write(*unread)
            written += len(unread)
        except PositionMoved:
            continue


async def test_a_feed_belongs_to_one_projector_until_its_lease_expires(ledger: Ledger, writer: FeedWriter) -> None:
    projection = writer.projection
    assert await projection.acquire(QUEUE, "one", 60_000) == FeedPosition()
    assert await projection.acquire(QUEUE, "two", 60_000) is None
    assert await projection.acquire("other", "two", 60_000) == FeedPosition()
    assert await projection.acquire(QUEUE, "one", 1) == FeedPosition()
    deadline = time.monotonic() + 5
    while await projection.acquire(QUEUE, "two", 60_000) is None:
        assert time.monotonic() < deadline
    assert await projection.acquire(QUEUE, "one", 60_000) is None
    await projection.release(QUEUE, "one")
    assert await projection.acquire(QUEUE, "one", 60_000) is None
    await projection.release(QUEUE, "two")
    assert await projection.acquire(QUEUE, "one", 60_000) == FeedPosition()


async def test_written_entries_are_identified_by_position_and_nonce(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    first, second = feed.entry(*feed.life("j1")), feed.entry(*feed.life("j2"))
    await writer.write(first)
    other = FeedEntry(first.position, "of another feed", first.events)
    assert await writer.projection.already_written(QUEUE, [first, second]) == {first.position}
    assert await writer.projection.already_written(QUEUE, [other]) == set()
    assert await writer.projection.already_written("other", [first]) == set()


# Anomalies and forks -------------------------------------------------------------------------------


async def test_events_after_a_final_event_are_anomalies(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    await writer.write(feed.entry(*feed.life("j1")))
    before = await job(ledger, "j1")
    done = await writer.write(feed.entry(feed.claimed("j1", 2), feed.succeeded("j1", 2), *feed.life("j2")))
    assert (done.events, done.anomalies) == (5, 2)
    assert await job(ledger, "j1") == before
    assert await event_types(ledger, "j1") == ["task.created", "task.claimed", "task.succeeded"]
    assert (await job(ledger, "j2"))["state"] == "succeeded"
    found = await rows(ledger, "SELECT * FROM anomalies ORDER BY id")
    assert [row["reason"] for row in found] == [AFTER_THE_END] * 2
    assert decode(found[0]["event"])["attempt"] == 2


async def test_a_job_that_is_created_again_is_an_anomaly(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    await writer.write(feed.entry(feed.created("j1")), feed.entry(*feed.life("j2")))
    await writer.write(feed.entry(feed.created("j1", task="other"), feed.created("j2"), feed.claimed("j1")))
    assert [row["reason"] for row in await rows(ledger, "SELECT * FROM anomalies")] == [CREATED_AGAIN] * 2
    row = await job(ledger, "j1")
    assert (row["job_type"], row["state"]) == ("add", "running")
    assert await check_ledger(ledger) == {"j1": _S.RUNNING, "j2": _S.SUCCEEDED}


@pytest.mark.parametrize("together", [True, False])
async def test_a_history_that_continues_from_an_earlier_point_is_forked(
    ledger: Ledger, writer: FeedWriter, together: bool
) -> None:
    feed = Feed()
    await writer.write(feed.entry(feed.created("j1"), feed.claimed("j1"), feed.failed("j1", _S.RETRYING)))
    again = [feed.claimed("j1"), feed.succeeded("j1")]
    for entry in [feed.entry(*again)] if together else [feed.entry(event) for event in again]:
        await writer.write(entry)
    expected = ["task.created", "task.claimed", "task.retrying", FORKED_EVENT, "task.claimed", "task.succeeded"]
    assert await event_types(ledger, "j1") == expected
    assert await check_ledger(ledger) == {"j1": _S.SUCCEEDED}
    assert [row["reason"] for row in await rows(ledger, "SELECT * FROM anomalies")] == [FORKED]


@pytest.mark.parametrize("together", [True, False])
async def test_an_earlier_attempt_in_the_same_state_is_a_fork(
    ledger: Ledger, writer: FeedWriter, together: bool
) -> None:
    """A replica has the job as retrying after attempt 1, the ledger has it as retrying after attempt 3."""
    feed = Feed()
    await writer.write(feed.entry(feed.created("j1"), feed.claimed("j1"), feed.failed("j1", _S.RETRYING)))
    for attempt in (2, 3):
        claimed = feed.claimed("j1", attempt, attempt - 1, was=_S.RETRYING)
        done = await writer.write(feed.entry(claimed, feed.failed("j1", _S.RETRYING, attempt, attempt)))
        assert (done.anomalies, done.slow_path) == (0, False)
    again = [feed.claimed("j1", 2, 1, was=_S.RETRYING), feed.succeeded("j1", 2, 1)]
    for entry in [feed.entry(*again)] if together else [feed.entry(event) for event in again]:
        await writer.write(entry)
    expected = ["task.created", *["task.claimed", "task.retrying"] * 3, FORKED_EVENT, "task.claimed", "task.succeeded"]
    assert await event_types(ledger, "j1") == expected
    assert await check_ledger(ledger) == {"j1": _S.SUCCEEDED}
    assert [row["reason"] for row in await rows(ledger, "SELECT * FROM anomalies")] == [FORKED]
    row = await job(ledger, "j1")
    assert (row["state"], row["attempt"], row["retry_count"]) == ("succeeded", 2, 1)


async def test_a_job_unknown_to_the_ledger_is_recorded_in_its_state(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    heartbeat = feed.event("ghost", None, None, 1, type=HEARTBEAT_EVENT)
    failed_event = feed.failed(
        "j1", _S.DLQ_PENDING, 3, 2, dlq_id="d1", history=[{"number": 1}, {"number": 2}, {"number": 3}]
    )
    await writer.write(feed.entry(heartbeat, failed_event))
    assert await event_types(ledger, "j1") == ["task.created", FORKED_EVENT, "task.dlq_pending"]
    row = await job(ledger, "j1")
    assert (row["state"], row["attempt"], row["job_type"], row["dlq_id"]) == ("dlq_pending", 3, "unknown", "d1")
    (item,) = await rows(ledger, "SELECT * FROM dlq_items")
    assert [attempt["number"] for attempt in decode(item["history"])] == [1, 2, 3]
    assert {row["reason"] for row in await rows(ledger, "SELECT * FROM anomalies")} == {UNKNOWN_JOB}
    assert await check_ledger(ledger) == {"j1": _S.DLQ_PENDING}


@pytest.mark.parametrize(
    "bad",
    [
        {"payload": '{"a": "\x00"}'},
        {"payload": '{"a": "\ud800"}'},
        {"trace_id": "\x00\udfff"},
        {"idempotency_key": "k" * 1_000_000},
        {"task": "t" * 100_000},
        {"priority": 10**12},
        {"payload": None},
        {"run_at_ms": 10**15},
        {"context": {"a": "\ud800\x00"}},
    ],
    ids=["nul", "surrogate", "trace", "long-key", "long-type", "number", "none", "time", "context"],
)
async def test_unstorable_values_stop_nothing(ledger: Ledger, writer: FeedWriter, bad: dict[str, Any]) -> None:
    feed = Feed()
    events = [
        feed.created("bad", **bad),
        *feed.life("j1"),
        feed.claimed("bad"),
        *feed.life("j2"),
        feed.succeeded("bad"),
    ]
    await writer.write(feed.entry(*events))
    states = await check_ledger(ledger)
    assert (states["j1"], states["j2"]) == (_S.SUCCEEDED, _S.SUCCEEDED)
    if states.get("bad") is not _S.SUCCEEDED:
        assert await rows(ledger, "SELECT * FROM anomalies WHERE job_id = 'bad'")
    await writer.write(feed.entry(*feed.life("j3")))
    assert (await check_ledger(ledger))["j3"] is _S.SUCCEEDED


@pytest.mark.parametrize("name", ["a\x00b", "a\ud800b", "x" * 100_000])
async def test_an_unstorable_job_id_stops_nothing(ledger: Ledger, writer: FeedWriter, name: str) -> None:
    feed = Feed()
    await writer.write(feed.entry(*feed.life(name), *feed.life("j1")))
    await writer.write(feed.entry(*feed.life("j2")))
    states = await check_ledger(ledger)
    assert (states["j1"], states["j2"]) == (_S.SUCCEEDED, _S.SUCCEEDED)
    assert len(states) == 3 or await rows(ledger, "SELECT * FROM anomalies")


async def test_unstorable_text_in_errors_is_cleaned(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    await writer.write(feed.entry(feed.created("j1"), feed.claimed("j1", worker="w\x00")))
    data = {"code": "TASK_ERROR", "message": "nul \x00 and \ud800", "type": "E", "stack": "\x00"}
    await writer.write(feed.entry(feed.event("j1", _S.RUNNING, _S.SUSPENDED, 1, 0, data=data, message="nul \x00")))
    row = await job(ledger, "j1")
    assert row["last_error"] == "E: nul \ufffd and \ufffd"
    assert await check_ledger(ledger) == {"j1": _S.SUSPENDED}
    assert not await rows(ledger, "SELECT * FROM anomalies")


# Dead letters --------------------------------------------------------------------------------------


async def test_a_dead_letter_has_every_attempt(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    await writer.write(feed.entry(feed.created("j1"), feed.claimed("j1"), feed.failed("j1", _S.RETRYING)))
    await writer.write(feed.entry(feed.claimed("j1", 2, 1, was=_S.RETRYING)))
    lost = feed.event("j1", _S.RUNNING, _S.RUNNING, 3, 1, worker="w3", data={"old_worker": "w2"})
    released = feed.event("j1", _S.RUNNING, _S.QUEUED, 3, 1, data={"message": "busy", "started": False})
    await writer.write(feed.entry(lost, released))
    done = await writer.write(
        feed.entry(feed.claimed("j1", 3, 1)), feed.entry(feed.failed("j1", _S.DLQ_PENDING, 3, 1, dlq_id="d1"))
    )
    assert done.dead_letters == 1
    (item,) = await rows(ledger, "SELECT * FROM dlq_items")
    assert (item["dlq_id"], item["job_id"], item["job_type"], item["trace_id"]) == ("d1", "j1", "add", "t-1")
    assert (item["payload"], item["error_code"], item["error"]) == ('{"a": 1, "b":2.0}', "TASK_ERROR", "boom 3")
    assert (item["stack"], item["retry_count"], item["status"], item["acked_at"]) == ("at x", 1, "open", None)
    history = decode(item["history"])
    assert [(each["number"], each["worker"], each["outcome"]) for each in history] == [
        (1, "w1", "retrying"),
        (2, "w2", "reclaimed"),
        (3, "w3", "dlq_pending"),
    ]
    assert history[0]["failure"] == {
        "code": "TASK_ERROR",
        "message": "boom 1",
        "type": "ValueError",
        "stack": "at x",
    }
    assert (await job(ledger, "j1"))["dlq_id"] == "d1"
    await check_ledger(ledger)


async def test_dead_letters_wait_for_their_acknowledgement(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    for name in ("j1", "j2"):
        failed_event = feed.failed(name, _S.DLQ_PENDING, dlq_id=f"d-{name}")
        await writer.write(feed.entry(feed.created(name), feed.claimed(name), failed_event))
    dead_letters = [RecordedDeadLetter(JobKey("default", QUEUE, name), f"d-{name}") for name in ("j1", "j2")]
    assert await writer.projection.unacked_dead_letters(QUEUE, 10) == dead_letters
    assert await writer.projection.unacked_dead_letters(QUEUE, 1) == dead_letters[:1]
    assert await writer.projection.unacked_dead_letters("other", 10) == []
    await writer.projection.ack_dead_letters(dead_letters[:1])
    await writer.projection.ack_dead_letters(dead_letters[:1])
    assert await writer.projection.unacked_dead_letters(QUEUE, 10) == dead_letters[1:]


async def test_a_dead_letter_already_failed_in_the_engine_needs_no_acknowledgement(
    ledger: Ledger, writer: FeedWriter
) -> None:
    feed = Feed()
    data = {"code": "MESSAGE_MALFORMED", "message": "no type", "dlq_id": "d1"}
    failed_event = feed.event("j1", _S.QUEUED, _S.DLQ_PENDING, data=data)
    recorded = feed.event("j1", _S.DLQ_PENDING, _S.DLQ_RECORDED, data={"dlq_id": "d1"})
    failed = feed.event("j1", _S.DLQ_RECORDED, _S.FAILED, data={"dlq_id": "d1"})
    done = await writer.write(feed.entry(feed.created("j1"), failed_event, recorded, failed))
    assert done.dead_letters == 0
    assert await writer.projection.unacked_dead_letters(QUEUE, 10) == []
    assert (await job(ledger, "j1"))["state"] == "failed"


async def test_a_job_dead_lettered_again_after_a_fork_has_one_dead_letter(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    first = feed.failed("j1", _S.DLQ_PENDING, dlq_id="d1")
    await writer.write(feed.entry(feed.created("j1"), feed.claimed("j1"), first))
    await writer.projection.ack_dead_letters(await writer.projection.unacked_dead_letters(QUEUE, 10))
    await writer.write(feed.entry(feed.claimed("j1"), feed.failed("j1", _S.DLQ_PENDING, dlq_id="d2")))
    assert [dead_letter.dlq_id for dead_letter in await writer.projection.unacked_dead_letters(QUEUE, 10)] == ["d2"]
    assert (await job(ledger, "j1"))["dlq_id"] == "d2"
    assert len(await rows(ledger, "SELECT * FROM dlq_items")) == 1


# Waiting -------------------------------------------------------------------------------------------


async def test_wait_position_change_returns_after_the_commit(
    ledger: Ledger, writer: FeedWriter, ledger_url: str
) -> None:
    feed, other = Feed(), open_ledger(ledger_url)
    assert other.projection is not None
    assert await other.projection.wait_position_change(QUEUE, FeedPosition(), 10) == FeedPosition()
    waiting = asyncio.create_task(other.projection.wait_position_change(QUEUE, FeedPosition(), 30_000))
    await asyncio.sleep(0.1)
    entry = feed.entry(*feed.life("j1"))
    began = time.monotonic()
    await writer.write(entry)
    assert await waiting == FeedPosition(entry.position, entry.nonce)
    assert time.monotonic() - began < 20
    await other.close()


async def test_wait_recorded_notifies_each_caller(ledger: Ledger, writer: FeedWriter, ledger_url: str) -> None:
    feed, other = Feed(), open_ledger(ledger_url)
    assert other.projection is not None
    keys = [JobKey("default", QUEUE, f"j{number}") for number in range(50)]
    waiting = [asyncio.create_task(other.projection.wait_recorded([key], 30_000)) for key in keys]
    all_waiting = asyncio.create_task(other.projection.wait_recorded(keys, 30_000))
    await asyncio.sleep(0.05)
    for key in keys:
        await writer.write(feed.entry(feed.created(key.job_id)))
    began = time.monotonic()
    assert await asyncio.gather(*waiting) == [{key} for key in keys]
    assert await all_waiting == set(keys)
    assert time.monotonic() - began < 20
    assert await other.projection.wait_recorded([keys[0], JobKey("default", QUEUE, "no")], 500) == {keys[0]}
    assert await other.projection.wait_recorded(keys[:2], 5_000) == set(keys[:2])
    await other.close()


async def test_long_keys_are_not_refused(ledger: Ledger, writer: FeedWriter) -> None:
    feed, number = Feed(), random.Random(7)
    long = {name: "".join(chr(number.randrange(0x10000, 0x1FFFF)) for _ in range(2_000)) for name in ("key", "trace")}
    done = await writer.write(
        feed.entry(feed.created("long", idempotency_key=long["key"], trace_id=long["trace"]), *feed.life("short"))
    )
    assert done.anomalies == 0
    assert (await job(ledger, "long"))["job_type"] == "add"
    by_key = await ledger.queries.jobs(JobFilter(idempotency_key=long["key"]))
    by_trace = await ledger.queries.jobs(JobFilter(trace_id=long["trace"], tenant_id="default"))
    assert [row.job_id for page in (by_key, by_trace) for row in page.jobs] == ["long", "long"]


async def test_a_job_without_its_creation_event_is_not_recorded(ledger: Ledger, writer: FeedWriter) -> None:
    feed, lost, named = Feed(), JobKey("default", QUEUE, "lost"), JobKey("default", QUEUE, "named")
    await writer.write(feed.entry(feed.claimed("lost"), feed.created("named", task="unknown")))
    assert (await job(ledger, "lost"))["job_type"] == "unknown"
    assert await writer.projection.wait_recorded([lost, named], 200) == {named}


async def test_an_entry_without_events_moves_the_position(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    first = feed.entry(*feed.life("j1"))
    await writer.write(first)
    await writer.write(FeedEntry("00000000-5", "x", []))
    assert await writer.projection.position(QUEUE) == FeedPosition("00000000-5", "x")
