"""Lists, pages, one job's history and counts, on both stores."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from holdfast.core.states import State
from holdfast.errors import InvalidOption, LedgerUnavailable, UnknownJob, UsageError
from holdfast.ledger.queries import job_list, paging
from holdfast.ledger.queries.job_list import JobFilter, from_cursor
from holdfast.ledger.queries.jobs import Queries
from holdfast.ledger.queries.records import JobRow
from holdfast.schema import idempotency_keys, job_steps
from tests.ledger.histories import START, History, S, async_url, open_engine, write


@pytest.fixture
async def ledger(ledger_url: str) -> AsyncIterator[AsyncEngine]:
    async with open_engine(ledger_url) as engine:
        yield engine


def minutes(number: float) -> datetime:
    return START + timedelta(minutes=number)


#: Every filter matches some of these jobs and excludes others.
JOBS = (
    History(S.QUEUED, job_id="j1", at=minutes(1), job_type="mail", trace_id="t-1"),
    History(S.QUEUED, S.RUNNING, job_id="j2", at=minutes(2), job_type="mail", worker="w", idempotency_key="order-2"),
    History(S.QUEUED, S.RUNNING, S.SUCCEEDED, job_id="j3", at=minutes(3), queue="reports", trace_id="t-1"),
    History(S.QUEUED, S.RUNNING, S.RETRYING, job_id="j4", at=minutes(4), last_error="ValueError: 100% Wrong_answer"),
    History(S.QUEUED, S.RUNNING, S.RETRYING, job_id="j5", at=minutes(5), last_error="KeyError: 'wrong answer'"),
    History(S.QUEUED, S.CANCELLED, job_id="j6", at=minutes(6), tenant_id="acme", job_type="mail"),
    History(S.QUEUED, S.RUNNING, S.SUCCEEDED, job_id="j1", at=minutes(7), tenant_id="acme", queue="reports"),
)

FILTERS: dict[str, tuple[JobFilter, list[str]]] = {
    "all": (JobFilter(), ["acme/j1", "acme/j6", "j5", "j4", "j3", "j2", "j1"]),
    "one state": (JobFilter(states=frozenset({S.RETRYING})), ["j5", "j4"]),
    "some states": (JobFilter(states=frozenset({S.QUEUED, S.RUNNING, S.CANCELLED})), ["acme/j6", "j2", "j1"]),
    "successes": (JobFilter(states=frozenset({S.SUCCEEDED})), ["acme/j1", "j3"]),
    "successes and others": (JobFilter(states=frozenset({S.SUCCEEDED, S.QUEUED})), ["acme/j1", "j3", "j1"]),
    "type": (JobFilter(job_type="mail"), ["acme/j6", "j2", "j1"]),
    "tenant": (JobFilter(tenant_id="acme"), ["acme/j1", "acme/j6"]),
    "unknown tenant": (JobFilter(tenant_id="unknown"), []),
    "queue": (JobFilter(queues=frozenset({"reports"})), ["acme/j1", "j3"]),
    "queues": (JobFilter(queues=frozenset({"reports", "default"}), tenant_id="acme"), ["acme/j1", "acme/j6"]),
    "since": (JobFilter(since=minutes(5)), ["acme/j1", "acme/j6", "j5"]),
    "until": (JobFilter(until=minutes(3)), ["j2", "j1"]),
    "between": (JobFilter(since=minutes(3), until=minutes(5)), ["j4", "j3"]),
    "text in the error": (JobFilter(error="wrong"), ["j5", "j4"]),
    "percent is not a wildcard": (JobFilter(error="100%"), ["j4"]),
    "underscore is not a wildcard": (JobFilter(error="wrong_ANSWER"), ["j4"]),
    "text without a match": (JobFilter(error="no such text"), []),
    "text and state": (JobFilter(error="keyerror", states=frozenset({S.RETRYING, S.FAILED})), ["j5"]),
    "trace": (JobFilter(trace_id="t-1"), ["j3", "j1"]),
    "trace and state": (JobFilter(trace_id="t-1", states=frozenset({S.QUEUED})), ["j1"]),
    "no trace": (JobFilter(trace_id="", job_type="mail"), ["acme/j6", "j2"]),
    "key": (JobFilter(idempotency_key="order-2"), ["j2"]),
    "key defaults to the job id": (JobFilter(idempotency_key="j1"), ["acme/j1", "j1"]),
    "job id with another key": (JobFilter(idempotency_key="j2"), []),
    "type and queue": (JobFilter(job_type="mail", queues=frozenset({"reports"})), []),
    "unstorable text": (JobFilter(trace_id="a\0b", job_type="\ud800", error="\0"), []),
}


def names(jobs: list[JobRow]) -> list[str]:
    return [job.job_id if job.tenant_id == "default" else f"{job.tenant_id}/{job.job_id}" for job in jobs]


@pytest.mark.parametrize(("filters", "expected"), FILTERS.values(), ids=FILTERS.keys())
async def test_jobs_are_listed_by_filter(ledger: AsyncEngine, filters: JobFilter, expected: list[str]) -> None:
    await write(ledger, *JOBS)
    page = await Queries(ledger).jobs(filters)
    assert names(page.jobs) == expected
    assert page.cursor is None
    assert names(await _all_pages(Queries(ledger), filters, 1)) == expected


async def test_an_empty_ledger_has_no_jobs(ledger: AsyncEngine) -> None:
    queries = Queries(ledger)
    page = await queries.jobs()
    assert (page.jobs, page.cursor) == ([], None)
    assert await queries.tenants() == []
    assert sum((await queries.counts()).states.values()) == 0


async def test_a_row_is_typed(ledger: AsyncEngine) -> None:
    await write(ledger, *JOBS)
    (job,) = (await Queries(ledger).jobs(JobFilter(idempotency_key="order-2"))).jobs
    assert job.state is S.RUNNING
    assert job.created_at == minutes(2)
    assert job.created_at.tzinfo is not None
    assert (job.worker, job.finished_at, job.last_seq) == ("w", None, 2)
    assert not hasattr(job, "payload")


# Pages -----------------------------------------------------------------------------------------------


async def _all_pages(queries: Queries, filters: JobFilter, limit: int) -> list[JobRow]:
    found: list[JobRow] = []
    cursor: str | None = None
    while True:
        page = await queries.jobs(filters, limit, cursor)
        assert len(page.jobs) <= limit
        found += page.jobs
        if page.cursor is None:
            return found
        cursor = page.cursor


@pytest.mark.parametrize("seed", [1, 2])
async def test_pages_add_up_to_the_whole_list(ledger: AsyncEngine, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    # Small enough for searches to stop in the middle, at different positions.
    monkeypatch.setattr(job_list, "SCANNED", 20)
    monkeypatch.setattr(job_list, "SCANNED_EACH", 5)
    rng = random.Random(seed)
    print("seed", seed)
    histories = [_random_job(rng, number) for number in range(60)]
    await write(ledger, *histories)
    queries = Queries(ledger)
    for _ in range(15):
        filters = _random_filter(rng)
        expected = sorted((each for each in histories if _matches(each.row, filters)), key=_order, reverse=True)
        found = await _all_pages(queries, filters, rng.choice([2, 5, 10, 200]))
        assert [job.key for job in found] == [each.key for each in expected], filters


def _random_job(rng: random.Random, number: int) -> History:
    steps = rng.choice([[S.QUEUED], [S.QUEUED, S.RUNNING, S.SUCCEEDED], [S.QUEUED, S.CANCELLED]])
    return History(
        *steps,
        # Many at the same instant, with ids that collations order differently.
        job_id=f"{rng.choice(['a', 'B', '_', 'ä', '-'])}{number}",
        at=minutes(rng.randrange(4)),
        tenant_id=rng.choice(["default", "acme", "Zoo"]),
        queue=rng.choice(["default", "Mail"]),
        job_type=rng.choice(["x", "y"]),
        last_error=rng.choice([None, "boom"]),
    )


def _random_filter(rng: random.Random) -> JobFilter:
    choices: dict[str, Any] = {
        "states": frozenset(rng.sample([S.QUEUED, S.SUCCEEDED, S.CANCELLED], rng.randint(1, 2))),
        "job_type": "x",
        "tenant_id": "acme",
        "queues": frozenset({"Mail"}),
        "error": "BOOM",
        "since": minutes(1),
        "until": minutes(3),
    }
    return JobFilter(**{name: choices[name] for name in rng.sample(sorted(choices), rng.randint(0, 3))})


def _matches(row: dict[str, Any], filters: JobFilter) -> bool:
    return (
        (not filters.states or row["state"] in filters.states)
        and filters.job_type in (None, row["job_type"])
        and filters.tenant_id in (None, row["tenant_id"])
        and (not filters.queues or row["queue"] in filters.queues)
        and (filters.error is None or row["last_error"] is not None)
        and (filters.since is None or row["created_at"] >= filters.since)
        and (filters.until is None or row["created_at"] < filters.until)
    )


def _order(history: History) -> tuple[datetime, str, str, str]:
    return history.row["created_at"], history.key.job_id, history.key.queue, history.key.tenant_id


async def test_pages_are_stable_while_jobs_are_added(ledger: AsyncEngine) -> None:
    await write(ledger, *(History(S.QUEUED, job_id=f"old-{number}", at=minutes(number)) for number in range(6)))
    queries = Queries(ledger)
    first = await queries.jobs(limit=3)
    await write(ledger, *(History(S.QUEUED, job_id=f"new-{number}", at=minutes(100 + number)) for number in range(6)))
    second = await queries.jobs(limit=3, cursor=first.cursor)
    assert names(first.jobs + second.jobs) == [f"old-{number}" for number in (5, 4, 3, 2, 1, 0)]
    assert second.cursor is None


@pytest.mark.parametrize(
    "cursor", ["garbage", "!!!", "12", "1-61-62", "1-6-62-63", "-1-61-62-63", "ä", "x" * 5000, "1-61-62-63\n"]
)
async def test_an_invalid_cursor_is_refused(ledger: AsyncEngine, cursor: str) -> None:
    with pytest.raises(UsageError, match="is not a cursor"):
        await Queries(ledger).jobs(cursor=cursor)
    # A number that is not an instant.
    with pytest.raises(UsageError):
        from_cursor("99999999999999999999-61-62-63")


async def test_invalid_limits_and_times_are_refused(ledger: AsyncEngine) -> None:
    for limit in (0, -1, paging.MAX_LIMIT + 1):
        with pytest.raises(InvalidOption, match="limit"):
            await Queries(ledger).jobs(limit=limit)
    with pytest.raises(InvalidOption, match="time zone"):
        JobFilter(since=datetime(2026, 1, 1))  # noqa: DTZ001 - that is the mistake


# One job ---------------------------------------------------------------------------------------------


async def test_one_job_and_its_events(ledger: AsyncEngine) -> None:
    history = History(
        S.QUEUED,
        (S.RUNNING, {"worker": "w-1"}),
        "task.heartbeat",
        (S.DLQ_PENDING, {"message": "boom", "data": {"failure": {"code": "TASK_ERROR"}}}),
        S.DLQ_RECORDED,
        S.FAILED,
        payload='{"amount": 12345678901234567890.10}',
        context='{"user":"u1"}',
    )
    await write(ledger, history, *JOBS)
    queries = Queries(ledger)
    job = await queries.job("j")
    assert job.state is S.FAILED
    assert job.payload.text == '{"amount": 12345678901234567890.10}'
    assert job.context is not None
    assert job.context.value == {"user": "u1"}
    assert job.result is None
    events = await queries.events(job.key)
    assert [event.seq for event in events] == [1, 2, 3, 4, 5, 6]
    assert [event.type for event in events][1:4] == ["task.claimed", "task.heartbeat", "task.dlq_pending"]
    assert events[0].from_state is None
    assert events[3].to_state is S.DLQ_PENDING
    assert events[3].event().data == {"failure": {"code": "TASK_ERROR"}}
    assert events[1].event().worker == "w-1"
    assert events[1].at == START + timedelta(seconds=1)
    dead_letter = await queries.dead_letter_of(job.key)
    assert dead_letter is not None
    assert (dead_letter.dlq_id, dead_letter.error, dead_letter.status) == ("dlq-j", "ValueError: boom", "open")


async def test_a_job_without_dead_letter_steps_or_effects(ledger: AsyncEngine) -> None:
    await write(ledger, *JOBS)
    queries = Queries(ledger)
    key = (await queries.job("j2")).key
    assert await queries.dead_letter_of(key) is None
    assert await queries.steps(key) == []
    assert await queries.effects(key) == []


async def test_steps_and_effects_of_a_job(ledger: AsyncEngine) -> None:
    await write(ledger, *JOBS)
    names = {"tenant_id": "default", "queue": "default", "job_id": "j2", "attempt": 1}
    async with ledger.begin() as connection:
        for position, name in enumerate(("fetch", "store")):
            step = {**names, "position": position + 1, "name": name, "result": "[1]", "at": START}
            await connection.execute(insert(job_steps), step)
        effect = {"key": "pay:1", "state": "in_doubt", "function": "pay", "fingerprint": "f", "token": "t"}
        times = {"created_at": START, "updated_at": START, "worker": "w", "reason": "lost"}
        await connection.execute(insert(idempotency_keys), {**names, **effect, **times})
    queries = Queries(ledger)
    key = (await queries.job("j2")).key
    assert [(step.position, step.name, step.result.value) for step in await queries.steps(key)] == [
        (1, "fetch", [1]),
        (2, "store", [1]),
    ]
    (found,) = await queries.effects(key)
    assert (found.key, found.state, found.reason, found.value) == ("pay:1", "in_doubt", "lost", None)


async def test_a_shared_id_means_the_newest_job_by_default(ledger: AsyncEngine) -> None:
    await write(ledger, *JOBS)
    queries = Queries(ledger)
    assert (await queries.job("j1")).tenant_id == "acme"
    assert (await queries.job("j1", tenant_id="default")).tenant_id == "default"
    assert (await queries.job("j1", queue="default")).tenant_id == "default"
    for wrong in ({"tenant_id": "x"}, {"queue": "x"}, {"tenant_id": "default", "queue": "reports"}):
        with pytest.raises(UnknownJob):
            await queries.job("j1", **wrong)
    with pytest.raises(UnknownJob):
        await queries.job("a\0b")


# Counts ----------------------------------------------------------------------------------------------


async def test_counts_by_state(ledger: AsyncEngine) -> None:
    await write(ledger, *JOBS)
    queries = Queries(ledger)
    counts = await queries.counts()
    assert counts.estimated == frozenset()
    assert {state: count for state, count in counts.states.items() if count} == {
        S.QUEUED: 1,
        S.RUNNING: 1,
        S.RETRYING: 2,
        S.SUCCEEDED: 2,
        S.CANCELLED: 1,
    }
    assert set(counts.states) == set(State)
    acme = await queries.counts("acme", exact=True)
    assert (acme.states[S.SUCCEEDED], acme.states[S.CANCELLED], acme.states[S.QUEUED]) == (1, 1, 0)
    assert (await queries.counts(queue="reports")).states[S.SUCCEEDED] == 2
    assert (await queries.counts("o'brien", "100%:x")).states[S.SUCCEEDED] == 0


async def test_many_successes_are_estimated_and_marked_so(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.ledger.queries.jobs.COUNTED", 50)
    async with open_engine(postgres_url) as engine:
        await write(engine, *(History(S.QUEUED, S.RUNNING, S.SUCCEEDED, job_id=f"s{n}") for n in range(200)))
        await write(engine, *(History(S.QUEUED, job_id=f"q{n}") for n in range(20)))
        async with engine.begin() as connection:
            await connection.exec_driver_sql("ANALYZE jobs")
        counts = await Queries(engine).counts()
        assert counts.estimated == {S.SUCCEEDED}
        assert counts.states[S.QUEUED] == 20
        assert 150 <= counts.states[S.SUCCEEDED] <= 250
        exact = await Queries(engine).counts(exact=True)
        assert (exact.states[S.SUCCEEDED], exact.estimated) == (200, frozenset())


async def test_the_newest_jobs(ledger: AsyncEngine) -> None:
    await write(ledger, *JOBS)
    assert names(await Queries(ledger).latest(2)) == ["acme/j1", "acme/j6"]
    assert names(await Queries(ledger).latest(1, "default")) == ["j5"]


# Faults ----------------------------------------------------------------------------------------------


async def test_an_unreachable_store_raises_unavailable() -> None:
    engine = create_async_engine(async_url("postgresql://user@127.0.0.1:1/none"))
    with pytest.raises(LedgerUnavailable, match="check that it is up"):
        await Queries(engine).jobs()
    await engine.dispose()


async def test_many_readers_at_once(ledger: AsyncEngine) -> None:
    await write(ledger, *JOBS)
    pages = await asyncio.gather(*(Queries(ledger).jobs(limit=2) for _ in range(20)))
    assert {tuple(names(page.jobs)) for page in pages} == {("acme/j1", "acme/j6")}
