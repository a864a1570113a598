"""Records in the file: gapless histories, dead letters, keys, and pruning."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from holdfast.core.job import Meta, Receipt
from holdfast.core.states import State
from holdfast.core.verdict import DeadLetter, Hold, Release, RetryLater, Settlement, Succeed, Suspend
from holdfast.engine.port.jobs import EngineOptions
from holdfast.engine.sqlite.engine import SqliteEngine
from holdfast.errors import TransitionInvalid
from holdfast.testing.inline import ManualClock
from tests.engine.sqlite.rig import FAILURE, QUEUE, envelope, open_engine, query_file, settle, start_one


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "holdfast.db"


async def test_every_job_has_a_gapless_history(path: Path) -> None:
    clock = ManualClock()
    async with open_engine(path, clock, max_deliveries=2) as engine:
        for verdict in (
            Succeed(b"1"),
            RetryLater(0, FAILURE),
            DeadLetter(FAILURE),
            Suspend(FAILURE),
            Hold("?"),
            Release("drain"),
        ):
            await settle(engine, await start_one(engine), verdict)
        for lost in range(3):
            clock.advance(31.0)
            await engine.reclaim(f"r{lost}", [QUEUE], 100)
            await engine.claim(f"c{lost}", [QUEUE], 100, 0)
    jobs = query_file(path, "SELECT id, last_seq FROM jobs")
    assert jobs
    for row, last_seq in jobs:
        events = query_file(path, "SELECT seq, from_state, to_state FROM job_events WHERE job_row = ? ORDER BY id", row)
        assert [seq for seq, _, _ in events] == list(range(1, last_seq + 1))
        assert all(before[2] == after[1] for before, after in pairwise(events))


async def test_the_feed_has_the_envelope_and_the_result(path: Path) -> None:
    async with open_engine(path) as engine:
        meta = Meta(context={"user": "u1"}, priority=0)
        claim = await start_one(engine, tenant_id="acme", trace_id="t", idempotency_key="k", meta=meta)
        await settle(engine, claim, Succeed(b'{"url":"x"}'))
        created, _, succeeded = [event for entry in await engine.read_feed(QUEUE, "", 10) for event in entry.events]
        assert created.data == {
            "task": "print",
            "payload": '{"n":1}',
            "tenant_id": "acme",
            "idempotency_key": "k",
            "trace_id": "t",
            "priority": 0,
            "context": {"user": "u1"},
            "run_at_ms": 0,
            "meta": f'{{"priority":0,"context":{{"user":"u1"}},"key_fingerprint":"{claim.meta.key_fingerprint}"}}',
        }
        assert succeeded.data == {"result": '{"url":"x"}'}
    (row,) = query_file(path, "SELECT retry_count, context, tenant_id, priority FROM jobs")
    assert row == (0, '{"user":"u1"}', "acme", 0)


async def test_a_retry_event_has_its_failure_and_due_time(path: Path) -> None:
    clock = ManualClock()
    async with open_engine(path, clock) as engine:
        claim = await start_one(engine)
        await settle(engine, claim, RetryLater(5_000, FAILURE))
        event = (await engine.read_feed(QUEUE, "", 10))[-1].events[0]
        assert event.data == {
            **msgspec.structs.asdict(FAILURE),
            "next_attempt_at_ms": clock.now_ms() + 5_000,
            "counted": True,
        }
    columns = "retry_count, error_code, last_error, error_message, next_retry_at"
    (row,) = query_file(path, f"SELECT {columns} FROM jobs")
    assert row == (1, "TASK_ERROR", "LuckError: no luck", "the job failed with TASK_ERROR", clock.now_ms() + 5_000)


async def test_a_dead_letter_is_complete(path: Path) -> None:
    async with open_engine(path) as engine:
        claim = await start_one(engine, tenant_id="acme", trace_id="t")
        await settle(engine, claim, DeadLetter(FAILURE))
        (info,) = await engine.get(QUEUE, [claim.job_id])
        assert info is not None
    columns = "tenant_id, dlq_id, job_id, job_type, trace_id, payload, retry_count, status"
    assert query_file(path, f"SELECT {columns} FROM dlq_items") == [
        ("acme", info.meta.dlq_id, claim.job_id, "print", "t", '{"n":1}', 0, "open")
    ]
    assert query_file(path, "SELECT error_code, error, stack FROM dlq_items") == [
        ("TASK_ERROR", "no luck", FAILURE.stack)
    ]
    (history,) = query_file(path, "SELECT history FROM dlq_items")[0]
    assert [attempt["outcome"] for attempt in msgspec.json.decode(history)] == ["dlq_pending"]
    assert query_file(path, "SELECT state, dlq_id FROM jobs") == [("failed", info.meta.dlq_id)]


async def test_without_a_dead_letter_stream_the_state_stays(path: Path) -> None:
    engine = SqliteEngine(path, EngineOptions(), stream_dlq=False)
    await engine.open()
    claim = await start_one(engine)
    await settle(engine, claim, DeadLetter(FAILURE))
    (info,) = await engine.get(QUEUE, [claim.job_id])
    assert info is not None
    assert info.state is State.FAILED
    assert (await engine.stats(QUEUE)).dead_letters == 0
    await engine.close()


async def test_an_operators_dead_letter_has_actor_and_reason(path: Path) -> None:
    async with open_engine(path) as engine:
        job = envelope()
        await engine.submit([job])
        await engine.move(QUEUE, job.job_id, State.DLQ_PENDING, actor="ann", reason="never again")
        (info,) = await engine.get(QUEUE, [job.job_id])
        assert info is not None
        assert info.failure is not None
        failure = ("DEAD_LETTERED_BY_OPERATOR", "never again (by ann)")
        assert (info.failure.code, info.failure.message) == failure
    assert query_file(path, "SELECT error_code, error FROM dlq_items") == [failure]


async def test_without_a_key_the_job_id_is_the_key(path: Path) -> None:
    async with open_engine(path) as engine:
        keyless, keyed = envelope(job_id="one"), envelope(job_id="two", idempotency_key="three")
        await engine.submit([keyless, keyed])
        assert await engine.submit([envelope(idempotency_key="one"), envelope(job_id="three")]) == [
            Receipt("one", duplicate=True),
            # Without a key it is identified by its id only, as on Redis.
            Receipt("three"),
        ]
        assert await engine.submit([envelope(idempotency_key="one", tenant_id="zeta", job_id="four")]) == [
            Receipt("four")
        ]


async def test_a_held_job_keeps_its_delay(path: Path) -> None:
    clock = ManualClock()
    async with open_engine(path, clock) as engine:
        job = envelope(hold=True, delay_ms=60_000)
        await engine.submit([job])
        await engine.move(QUEUE, job.job_id, State.QUEUED, actor="ann", reason="fine")
        assert await engine.claim("w1", [QUEUE], 1, 0) == []
        clock.advance(60.0)
        assert len(await engine.claim("w1", [QUEUE], 1, 0)) == 1


async def test_a_clock_that_jumps_back_does_not_delay_ready_jobs(path: Path) -> None:
    clock = ManualClock()
    async with open_engine(path, clock) as engine:
        first, second = envelope(), envelope()
        await engine.submit([first])
        clock.jump(clock.now_ms() - 3_600_000)
        await engine.submit([second])
        claims = await engine.claim("w1", [QUEUE], 10, 0)
        assert {claim.job_id for claim in claims} == {first.job_id, second.job_id}


# Pruning --------------------------------------------------------------------------------------------


async def test_pruning_deletes_jobs_events_and_keys(path: Path) -> None:
    clock = ManualClock()
    async with open_engine(path, clock, finished_ttl_ms=60_000, idempotency_window_ms=120_000) as engine:
        await engine.submit([envelope() for _ in range(450)])
        claims = await engine.claim("w1", [QUEUE], 500, 0)
        await engine.settle([Settlement(claim, Succeed(b"1"), 1) for claim in claims])
        await settle(engine, await start_one(engine, idempotency_key="k"), Succeed(b"1"))
        await engine.submit([envelope(idempotency_key="open")])
        clock.advance(61.0)
        assert await engine.prune([QUEUE]) >= 451
        assert query_file(path, "SELECT count(*) FROM jobs") == [(1,)]
        assert query_file(path, "SELECT count(*) FROM job_events") == [(1,)]
        assert query_file(path, "SELECT key FROM submission_keys ORDER BY key") == [("k",), ("open",)]
        clock.advance(61.0)
        await engine.prune([QUEUE])
        # The key of a job that is still open is kept.
        assert query_file(path, "SELECT key FROM submission_keys") == [("open",)]


async def test_jobs_that_a_reader_still_needs_are_not_pruned(path: Path) -> None:
    clock = ManualClock()
    async with open_engine(path, clock, finished_ttl_ms=60_000) as engine:
        await engine.attach_reader(QUEUE)
        claim = await start_one(engine)
        await settle(engine, claim, Succeed(b'"kept"'))
        clock.advance(61.0)
        await engine.prune([QUEUE])
        feed = await engine.read_feed(QUEUE, "", 100)
        assert [event.type for entry in feed for event in entry.events][-1] == "task.succeeded"
        assert feed[-1].events[0].data == {"result": '"kept"'}
        # Queries no longer return it.
        assert await engine.get(QUEUE, [claim.job_id]) == [None]

        await engine.submit([envelope()])
        latest = (await engine.read_feed(QUEUE, "", 100))[-1]
        await engine.trim_feed(QUEUE, latest.position)
        assert await engine.prune([QUEUE]) >= 1
        assert query_file(path, "SELECT count(*) FROM jobs WHERE state = 'succeeded'") == [(0,)]


async def test_positions_are_never_reused(path: Path) -> None:
    clock = ManualClock()
    async with open_engine(path, clock, finished_ttl_ms=1_000) as engine:
        claim = await start_one(engine)
        await settle(engine, claim, Succeed(b"1"))
        position = int((await engine.read_feed(QUEUE, "", 100))[-1].position)
        clock.advance(2.0)
        await engine.prune([QUEUE])
        assert query_file(path, "SELECT count(*) FROM job_events") == [(0,)]
        second = await start_one(engine)
        assert int((await engine.read_feed(QUEUE, str(position + 1), 100))[0].position) > position
        assert second.lease.position != claim.lease.position


async def test_workers_that_were_not_seen_for_long_are_pruned(path: Path) -> None:
    clock = ManualClock()
    async with open_engine(path, clock) as engine:
        await engine.claim("gone", [QUEUE], 1, 0)
        await start_one(engine)
        clock.advance(3_600.0)
        await engine.prune([QUEUE])
        # It still has a lease.
        assert query_file(path, "SELECT worker FROM workers") == [("w1",)]
        await engine.claim("gone", [QUEUE], 1, 0)
        assert (await engine.stats(QUEUE)).workers == 2


async def test_an_illegal_move_is_counted_and_changes_nothing(path: Path) -> None:
    async with open_engine(path) as engine:
        claim = await start_one(engine)
        await settle(engine, claim, Succeed(b"1"))
        before = query_file(path, "SELECT * FROM jobs"), query_file(path, "SELECT * FROM job_events")
        with pytest.raises(TransitionInvalid):
            await engine.move(QUEUE, claim.job_id, State.CANCELLED, actor="ann", reason="")
        assert engine.counters.illegal_moves == 1
        assert (query_file(path, "SELECT * FROM jobs"), query_file(path, "SELECT * FROM job_events")) == before
