"""The projector's writing end, on both stores: what a batch of events leaves in the tables (rules 14–18)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
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
    Scribe,
    check_ledger,
    decode,
    job,
    open_ledger,
    rows,
    story,
)

_S = State


@pytest.fixture
async def ledger(ledger_url: str) -> AsyncIterator[Ledger]:
    made = open_ledger(ledger_url)
    await made.open()
    yield made
    await made.close()


@pytest.fixture
def scribe(ledger: Ledger) -> Scribe:
    return Scribe(ledger)


# Stories -------------------------------------------------------------------------------------------


async def test_a_whole_life_in_one_batch(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    await scribe.write(feed.entry(*feed.life("j1")))
    assert await story(ledger, "j1") == ["task.created", "task.claimed", "task.succeeded"]
    row = await job(ledger, "j1")
    assert (row["state"], row["last_seq"], row["attempt"], row["result"]) == ("succeeded", 3, 1, "3")
    assert (row["job_type"], row["payload"], row["trace_id"]) == ("add", '{"a": 1, "b":2.0}', "t-1")
    assert row["worker"] is None
    assert row["finished_at"] == row["updated_at"] > row["created_at"]


async def test_a_life_over_many_batches_is_the_same_as_in_one(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    for made in feed.life("j1"):
        await scribe.write(feed.entry(made))
    assert await story(ledger, "j1") == ["task.created", "task.claimed", "task.succeeded"]
    row = await job(ledger, "j1")
    assert (row["state"], row["last_seq"], row["attempt"], row["result"]) == ("succeeded", 3, 1, "3")


async def test_a_running_job_names_its_worker_and_keeps_its_last_error(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    await scribe.write(feed.entry(feed.created("j1"), feed.claimed("j1")))
    await scribe.write(feed.entry(feed.failed("j1", _S.RETRYING)))
    row = await job(ledger, "j1")
    assert (row["state"], row["retry_count"], row["error_code"]) == ("retrying", 1, "TASK_ERROR")
    assert row["last_error"] == "ValueError: boom 1"
    assert "boom" not in row["error_message"]
    assert row["next_retry_at"] is not None
    await scribe.write(feed.entry(feed.claimed("j1", 2, 1, was=_S.RETRYING)))
    row = await job(ledger, "j1")
    assert (row["state"], row["worker"], row["last_error"]) == ("running", "w2", "ValueError: boom 1")
    assert row["next_retry_at"] is None
    await scribe.write(feed.entry(feed.succeeded("j1", 2, 1)))
    row = await job(ledger, "j1")
    assert (row["state"], row["worker"], row["last_error"], row["error_code"]) == ("succeeded", None, None, None)
    await check_ledger(ledger)


async def test_events_beside_the_moves_have_a_number_and_change_nothing(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    await scribe.write(feed.entry(feed.created("j1"), feed.claimed("j1")))
    before = await job(ledger, "j1")
    beat = feed.event("j1", None, None, 1, 0, type=HEARTBEAT_EVENT, worker="w1")
    await scribe.write(feed.entry(beat))
    assert await job(ledger, "j1") == before | {"last_seq": 3}
    copy = feed.event("j1", None, None, type=DUPLICATE_EVENT, data={"message_id": "1-1"})
    await scribe.write(feed.entry(beat, feed.succeeded("j1"), copy))
    await scribe.write(feed.entry(copy))
    names = ["task.created", "task.claimed", "task.heartbeat", "task.heartbeat", "task.succeeded"]
    assert await story(ledger, "j1") == [*names, "task.duplicate", "task.duplicate"]
    assert not await rows(ledger, "SELECT * FROM anomalies")


async def test_tenants_with_the_same_job_id_are_two_jobs(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    await scribe.write(feed.entry(feed.created("j1", tenant_id="a"), feed.created("j1", tenant_id="b")))
    await scribe.write(feed.entry(feed.claimed("j1", tenant_id="a")))
    states = await rows(ledger, "SELECT tenant_id, state FROM jobs ORDER BY tenant_id")
    assert [(row["tenant_id"], row["state"]) for row in states] == [("a", "running"), ("b", "queued")]


async def test_random_lives_cut_into_random_batches_are_whole(ledger: Ledger, scribe: Scribe) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    chance, feed = random.Random(seed), Feed()
    lives = [_random_life(feed, f"j{number}", chance) for number in range(60)]
    told = {events[0].job_id: [event.type for event in events] for events in lives}
    waiting = [events for events in lives if events]
    entries = []
    while waiting:
        batch = []
        for _ in range(chance.randint(1, 30)):
            if waiting:
                events = chance.choice(waiting)
                batch.append(events.pop(0))
                waiting = [events for events in waiting if events]
        entries.append(feed.entry(*batch))
    while entries:
        size = chance.randint(1, 4)
        done = await scribe.write(*entries[:size])
        assert not done.slow_path
        entries = entries[size:]
    await check_ledger(ledger)
    for job_id, names in told.items():
        assert await story(ledger, job_id) == names
    assert not await rows(ledger, "SELECT * FROM anomalies")


def _random_life(feed: Feed, job_id: str, chance: random.Random) -> list[Event]:
    events, attempt, retries, was = [feed.created(job_id)], 0, 0, _S.QUEUED
    while True:
        attempt += 1
        events.append(feed.claimed(job_id, attempt, retries, was=was))
        ending = chance.choice(["succeed", "retry", "die", "lose"])
        if ending == "lose":
            attempt += 1
            events.append(feed.event(job_id, _S.RUNNING, _S.RUNNING, attempt, retries, worker="w9"))
        if ending == "retry":
            retries += 1
            events.append(feed.failed(job_id, _S.RETRYING, attempt, retries))
            was = _S.RETRYING
            continue
        if ending == "die":
            events.append(feed.failed(job_id, _S.DLQ_PENDING, attempt, retries, dlq_id=f"d-{job_id}"))
            for was, to in ((_S.DLQ_PENDING, _S.DLQ_RECORDED), (_S.DLQ_RECORDED, _S.FAILED)):
                events.append(feed.event(job_id, was, to, attempt, retries, data={"dlq_id": f"d-{job_id}"}))
            return events
        events.append(feed.succeeded(job_id, attempt, retries))
        return events


# The position --------------------------------------------------------------------------------------


async def test_the_position_moves_with_the_rows_or_nothing_does(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    first, second = feed.entry(*feed.life("j1")), feed.entry(*feed.life("j2"))
    await scribe.write(first)
    assert await scribe.projection.position(QUEUE) == FeedPosition(first.position, first.nonce)
    late = Scribe(ledger)
    with pytest.raises(PositionMoved):
        await late.write(first, second)
    wrong = Scribe(ledger)
    wrong.at = FeedPosition(first.position, "another feed")
    with pytest.raises(PositionMoved):
        await wrong.write(second)
    assert await check_ledger(ledger) == {"j1": _S.SUCCEEDED}


async def test_of_two_projectors_at_once_one_writes(ledger: Ledger, ledger_url: str) -> None:
    feed = Feed()
    entries = [feed.entry(*feed.life(f"j{number}")) for number in range(20)]
    others = [open_ledger(ledger_url) for _ in range(3)]
    try:
        done = await asyncio.gather(*(_race(Scribe(other), entries) for other in others))
    finally:
        for other in others:
            await other.close()
    assert sum(done) == len(entries)
    assert len(await check_ledger(ledger)) == len(entries)


async def _race(scribe: Scribe, entries: list[FeedEntry]) -> int:
    written = 0
    while True:
        scribe.at = await scribe.projection.position(QUEUE)
        left = [entry for entry in entries if entry.position > scribe.at.position][:3]
        if not left:
            return written
        try:
            await scribe.write(*left)
            written += len(left)
        except PositionMoved:
            continue


async def test_a_feed_is_one_projectors_until_its_lease_is_over(ledger: Ledger, scribe: Scribe) -> None:
    projection = scribe.projection
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


async def test_written_tells_entries_by_position_and_nonce(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    first, second = feed.entry(*feed.life("j1")), feed.entry(*feed.life("j2"))
    await scribe.write(first)
    other = FeedEntry(first.position, "of another feed", first.events)
    assert await scribe.projection.already_written(QUEUE, [first, second]) == {first.position}
    assert await scribe.projection.already_written(QUEUE, [other]) == set()
    assert await scribe.projection.already_written("other", [first]) == set()


# What does not fit ---------------------------------------------------------------------------------


async def test_nothing_follows_an_end(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    await scribe.write(feed.entry(*feed.life("j1")))
    before = await job(ledger, "j1")
    done = await scribe.write(feed.entry(feed.claimed("j1", 2), feed.succeeded("j1", 2), *feed.life("j2")))
    assert (done.events, done.anomalies) == (5, 2)
    assert await job(ledger, "j1") == before
    assert await story(ledger, "j1") == ["task.created", "task.claimed", "task.succeeded"]
    assert (await job(ledger, "j2"))["state"] == "succeeded"
    found = await rows(ledger, "SELECT * FROM anomalies ORDER BY id")
    assert [row["reason"] for row in found] == [AFTER_THE_END] * 2
    assert decode(found[0]["event"])["attempt"] == 2


async def test_a_job_that_is_created_again_is_an_anomaly(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    await scribe.write(feed.entry(feed.created("j1")), feed.entry(*feed.life("j2")))
    await scribe.write(feed.entry(feed.created("j1", task="other"), feed.created("j2"), feed.claimed("j1")))
    assert [row["reason"] for row in await rows(ledger, "SELECT * FROM anomalies")] == [CREATED_AGAIN] * 2
    row = await job(ledger, "j1")
    assert (row["job_type"], row["state"]) == ("add", "running")
    assert await check_ledger(ledger) == {"j1": _S.RUNNING, "j2": _S.SUCCEEDED}


@pytest.mark.parametrize("together", [True, False])
async def test_a_story_that_went_on_from_an_earlier_point_is_forked(
    ledger: Ledger, scribe: Scribe, together: bool
) -> None:
    feed = Feed()
    await scribe.write(feed.entry(feed.created("j1"), feed.claimed("j1"), feed.failed("j1", _S.RETRYING)))
    again = [feed.claimed("j1"), feed.succeeded("j1")]
    for entry in [feed.entry(*again)] if together else [feed.entry(event) for event in again]:
        await scribe.write(entry)
    told = ["task.created", "task.claimed", "task.retrying", FORKED_EVENT, "task.claimed", "task.succeeded"]
    assert await story(ledger, "j1") == told
    assert await check_ledger(ledger) == {"j1": _S.SUCCEEDED}
    assert [row["reason"] for row in await rows(ledger, "SELECT * FROM anomalies")] == [FORKED]


@pytest.mark.parametrize("together", [True, False])
async def test_an_earlier_attempt_in_the_same_state_is_a_fork(ledger: Ledger, scribe: Scribe, together: bool) -> None:
    """A replica that knew the job as retrying after attempt 1, where the ledger has it retrying after attempt 3."""
    feed = Feed()
    await scribe.write(feed.entry(feed.created("j1"), feed.claimed("j1"), feed.failed("j1", _S.RETRYING)))
    for attempt in (2, 3):
        claimed = feed.claimed("j1", attempt, attempt - 1, was=_S.RETRYING)
        done = await scribe.write(feed.entry(claimed, feed.failed("j1", _S.RETRYING, attempt, attempt)))
        assert (done.anomalies, done.slow_path) == (0, False)
    again = [feed.claimed("j1", 2, 1, was=_S.RETRYING), feed.succeeded("j1", 2, 1)]
    for entry in [feed.entry(*again)] if together else [feed.entry(event) for event in again]:
        await scribe.write(entry)
    told = ["task.created", *["task.claimed", "task.retrying"] * 3, FORKED_EVENT, "task.claimed", "task.succeeded"]
    assert await story(ledger, "j1") == told
    assert await check_ledger(ledger) == {"j1": _S.SUCCEEDED}
    assert [row["reason"] for row in await rows(ledger, "SELECT * FROM anomalies")] == [FORKED]
    row = await job(ledger, "j1")
    assert (row["state"], row["attempt"], row["retry_count"]) == ("succeeded", 2, 1)


async def test_a_job_that_the_ledger_never_heard_of_is_taken_up_where_it_is(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    beat = feed.event("ghost", None, None, 1, type=HEARTBEAT_EVENT)
    dies = feed.failed("j1", _S.DLQ_PENDING, 3, 2, dlq_id="d1", history=[{"number": 1}, {"number": 2}, {"number": 3}])
    await scribe.write(feed.entry(beat, dies))
    assert await story(ledger, "j1") == ["task.created", FORKED_EVENT, "task.dlq_pending"]
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
async def test_garbage_stops_nothing(ledger: Ledger, scribe: Scribe, bad: dict[str, Any]) -> None:
    feed = Feed()
    events = [
        feed.created("bad", **bad),
        *feed.life("j1"),
        feed.claimed("bad"),
        *feed.life("j2"),
        feed.succeeded("bad"),
    ]
    await scribe.write(feed.entry(*events))
    states = await check_ledger(ledger)
    assert (states["j1"], states["j2"]) == (_S.SUCCEEDED, _S.SUCCEEDED)
    if states.get("bad") is not _S.SUCCEEDED:
        assert await rows(ledger, "SELECT * FROM anomalies WHERE job_id = 'bad'")
    await scribe.write(feed.entry(*feed.life("j3")))
    assert (await check_ledger(ledger))["j3"] is _S.SUCCEEDED


@pytest.mark.parametrize("name", ["a\x00b", "a\ud800b", "x" * 100_000])
async def test_a_job_id_that_no_store_takes_stops_nothing(ledger: Ledger, scribe: Scribe, name: str) -> None:
    feed = Feed()
    await scribe.write(feed.entry(*feed.life(name), *feed.life("j1")))
    await scribe.write(feed.entry(*feed.life("j2")))
    states = await check_ledger(ledger)
    assert (states["j1"], states["j2"]) == (_S.SUCCEEDED, _S.SUCCEEDED)
    assert len(states) == 3 or await rows(ledger, "SELECT * FROM anomalies")


async def test_bad_words_in_results_and_errors_are_kept_as_far_as_can_be(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    await scribe.write(feed.entry(feed.created("j1"), feed.claimed("j1", worker="w\x00")))
    data = {"code": "TASK_ERROR", "message": "nul \x00 and \ud800", "type": "E", "stack": "\x00"}
    await scribe.write(feed.entry(feed.event("j1", _S.RUNNING, _S.SUSPENDED, 1, 0, data=data, message="nul \x00")))
    row = await job(ledger, "j1")
    assert row["last_error"] == "E: nul \ufffd and \ufffd"
    assert await check_ledger(ledger) == {"j1": _S.SUSPENDED}
    assert not await rows(ledger, "SELECT * FROM anomalies")


# Dead letters --------------------------------------------------------------------------------------


async def test_a_dead_letter_has_every_attempt(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    await scribe.write(feed.entry(feed.created("j1"), feed.claimed("j1"), feed.failed("j1", _S.RETRYING)))
    await scribe.write(feed.entry(feed.claimed("j1", 2, 1, was=_S.RETRYING)))
    lost = feed.event("j1", _S.RUNNING, _S.RUNNING, 3, 1, worker="w3", data={"old_worker": "w2"})
    given_back = feed.event("j1", _S.RUNNING, _S.QUEUED, 3, 1, data={"message": "busy", "started": False})
    await scribe.write(feed.entry(lost, given_back))
    done = await scribe.write(
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


async def test_dead_letters_wait_for_their_acknowledgement(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    for name in ("j1", "j2"):
        dies = feed.failed(name, _S.DLQ_PENDING, dlq_id=f"d-{name}")
        await scribe.write(feed.entry(feed.created(name), feed.claimed(name), dies))
    letters = [RecordedDeadLetter(JobKey("default", QUEUE, name), f"d-{name}") for name in ("j1", "j2")]
    assert await scribe.projection.unacked_dead_letters(QUEUE, 10) == letters
    assert await scribe.projection.unacked_dead_letters(QUEUE, 1) == letters[:1]
    assert await scribe.projection.unacked_dead_letters("other", 10) == []
    await scribe.projection.ack_dead_letters(letters[:1])
    await scribe.projection.ack_dead_letters(letters[:1])
    assert await scribe.projection.unacked_dead_letters(QUEUE, 10) == letters[1:]


async def test_a_letter_of_an_engine_that_made_all_the_moves_needs_no_acknowledgement(
    ledger: Ledger, scribe: Scribe
) -> None:
    feed = Feed()
    data = {"code": "MESSAGE_MALFORMED", "message": "no type", "dlq_id": "d1"}
    dies = feed.event("j1", _S.QUEUED, _S.DLQ_PENDING, data=data)
    recorded = feed.event("j1", _S.DLQ_PENDING, _S.DLQ_RECORDED, data={"dlq_id": "d1"})
    failed = feed.event("j1", _S.DLQ_RECORDED, _S.FAILED, data={"dlq_id": "d1"})
    done = await scribe.write(feed.entry(feed.created("j1"), dies, recorded, failed))
    assert done.dead_letters == 0
    assert await scribe.projection.unacked_dead_letters(QUEUE, 10) == []
    assert (await job(ledger, "j1"))["state"] == "failed"


async def test_a_job_that_dies_again_after_a_fork_has_one_letter(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    first = feed.failed("j1", _S.DLQ_PENDING, dlq_id="d1")
    await scribe.write(feed.entry(feed.created("j1"), feed.claimed("j1"), first))
    await scribe.projection.ack_dead_letters(await scribe.projection.unacked_dead_letters(QUEUE, 10))
    await scribe.write(feed.entry(feed.claimed("j1"), feed.failed("j1", _S.DLQ_PENDING, dlq_id="d2")))
    assert [letter.dlq_id for letter in await scribe.projection.unacked_dead_letters(QUEUE, 10)] == ["d2"]
    assert (await job(ledger, "j1"))["dlq_id"] == "d2"
    assert len(await rows(ledger, "SELECT * FROM dlq_items")) == 1


# Waiting -------------------------------------------------------------------------------------------


async def test_wait_moved_returns_with_the_commit(ledger: Ledger, scribe: Scribe, ledger_url: str) -> None:
    feed, other = Feed(), open_ledger(ledger_url)
    assert other.projection is not None
    assert await other.projection.wait_position_change(QUEUE, FeedPosition(), 10) == FeedPosition()
    waiting = asyncio.create_task(other.projection.wait_position_change(QUEUE, FeedPosition(), 30_000))
    await asyncio.sleep(0.1)
    entry = feed.entry(*feed.life("j1"))
    began = time.monotonic()
    await scribe.write(entry)
    assert await waiting == FeedPosition(entry.position, entry.nonce)
    assert time.monotonic() - began < 20
    await other.close()


async def test_wait_present_answers_each_caller(ledger: Ledger, scribe: Scribe, ledger_url: str) -> None:
    feed, other = Feed(), open_ledger(ledger_url)
    assert other.projection is not None
    keys = [JobKey("default", QUEUE, f"j{number}") for number in range(50)]
    waiting = [asyncio.create_task(other.projection.wait_recorded([key], 30_000)) for key in keys]
    everybody = asyncio.create_task(other.projection.wait_recorded(keys, 30_000))
    await asyncio.sleep(0.05)
    for key in keys:
        await scribe.write(feed.entry(feed.created(key.job_id)))
    began = time.monotonic()
    assert await asyncio.gather(*waiting) == [{key} for key in keys]
    assert await everybody == set(keys)
    assert time.monotonic() - began < 20
    assert await other.projection.wait_recorded([keys[0], JobKey("default", QUEUE, "no")], 500) == {keys[0]}
    assert await other.projection.wait_recorded(keys[:2], 5_000) == set(keys[:2])
    await other.close()


async def test_no_job_is_refused_for_the_length_of_its_key(ledger: Ledger, scribe: Scribe) -> None:
    feed, number = Feed(), random.Random(7)
    long = {name: "".join(chr(number.randrange(0x10000, 0x1FFFF)) for _ in range(2_000)) for name in ("key", "trace")}
    done = await scribe.write(
        feed.entry(feed.created("long", idempotency_key=long["key"], trace_id=long["trace"]), *feed.life("short"))
    )
    assert done.anomalies == 0
    assert (await job(ledger, "long"))["job_type"] == "add"
    by_key = await ledger.queries.jobs(JobFilter(idempotency_key=long["key"]))
    by_trace = await ledger.queries.jobs(JobFilter(trace_id=long["trace"], tenant_id="default"))
    assert [row.job_id for page in (by_key, by_trace) for row in page.jobs] == ["long", "long"]


async def test_a_job_without_its_creation_is_not_there(ledger: Ledger, scribe: Scribe) -> None:
    feed, lost, named = Feed(), JobKey("default", QUEUE, "lost"), JobKey("default", QUEUE, "named")
    await scribe.write(feed.entry(feed.claimed("lost"), feed.created("named", task="unknown")))
    assert (await job(ledger, "lost"))["job_type"] == "unknown"
    assert await scribe.projection.wait_recorded([lost, named], 200) == {named}


async def test_an_entry_without_events_moves_the_position(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    first = feed.entry(*feed.life("j1"))
    await scribe.write(first)
    await scribe.write(FeedEntry("00000000-5", "x", []))
    assert await scribe.projection.position(QUEUE) == FeedPosition("00000000-5", "x")
