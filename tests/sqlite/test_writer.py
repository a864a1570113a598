"""The writer thread: group commit, isolated failures, replies after the commit, few statements, no idle writes."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.core.job import MAX_BATCH
from holdfast.core.states import State
from holdfast.core.verdict import Settlement, SettleResult, Succeed
from holdfast.engine.port.operators import QueueControl
from holdfast.engine.sqlite.engine import SqliteEngine
from holdfast.errors import IntakeRefused, TransitionInvalid
from holdfast.sqlite.transaction import Transaction
from holdfast.testing.inline import ManualClock
from tests.engine.sqlite.rig import QUEUE, envelope, open_engine, query_file, start_one
from tests.worker.support import eventually


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "holdfast.db"


async def trace(engine: SqliteEngine, statements: list[str]) -> None:
    """Record every statement that the writer runs from now on."""
    await engine._store.write(
        lambda transaction: transaction._connection.set_trace_callback(statements.append), lazy=True
    )


async def hold_writer(engine: SqliteEngine) -> Callable[[], None]:
    """Keep the writer busy, so that further operations share the next commit."""
    busy, free = threading.Event(), threading.Event()

    def wait(transaction: Transaction) -> None:
        busy.set()
        assert free.wait(10)

    task = asyncio.create_task(engine._store.write(wait, lazy=True))
    assert await asyncio.to_thread(busy.wait, 10)

    def release() -> None:
        free.set()
        task.add_done_callback(lambda done: done.result())

    return release


async def wait_enqueued(engine: SqliteEngine, count: int) -> None:
    """Wait until the busy writer has `count` operations in its queue."""
    writer = engine._store._writer
    assert writer is not None
    await eventually(lambda: len(writer._requests) >= count, "operations in the queue")


async def test_concurrent_operations_share_one_commit(path: Path) -> None:
    async with open_engine(path) as engine:
        statements: list[str] = []
        await trace(engine, statements)
        release = await hold_writer(engine)
        submits = [asyncio.create_task(engine.submit([envelope()])) for _ in range(50)]
        await wait_enqueued(engine, 50)
        release()
        await asyncio.gather(*submits)
        assert statements.count("COMMIT") == 1
        assert len(await engine.claim("w1", [QUEUE], 100, 0)) == 50


async def test_a_failed_operation_does_not_affect_the_others(path: Path) -> None:
    async with open_engine(path) as engine:
        claim = await start_one(engine)
        await engine.set_control("closed", QueueControl(intake_paused=True))
        release = await hold_writer(engine)
        work = [
            engine.submit([envelope()]),
            engine.submit([envelope(queue="closed")]),
            engine.move(QUEUE, claim.job_id, State.FAILED, actor="ann", reason=""),
            engine._store.write(write_and_fail),
            engine.settle([Settlement(claim, Succeed(b"1"), 1)]),
        ]
        tasks = [asyncio.ensure_future(operation) for operation in work]
        await wait_enqueued(engine, len(tasks))
        release()
        submitted, refused, illegal, broken, settled = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(submitted, list)
        assert isinstance(refused, IntakeRefused)
        assert isinstance(illegal, TransitionInvalid)
        assert isinstance(broken, ZeroDivisionError)
        assert settled == [SettleResult.APPLIED]
    assert query_file(path, "SELECT state, count(*) FROM jobs GROUP BY state") == [("queued", 1), ("succeeded", 1)]
    assert query_file(path, "SELECT count(*) FROM workers WHERE worker = 'ghost'") == [(0,)]


def write_and_fail(transaction: Transaction) -> None:
    transaction.run("touch_worker", worker="ghost", queue=QUEUE, now=1)
    raise ZeroDivisionError


async def test_a_failed_operation_is_rolled_back(path: Path) -> None:
    async with open_engine(path) as engine:
        with pytest.raises(ZeroDivisionError):
            await engine._store.write(write_and_fail)
        await engine.submit([envelope()])
    assert query_file(path, "SELECT count(*) FROM workers") == [(0,)]


async def test_no_reply_is_sent_before_the_commit(path: Path) -> None:
    """Another connection sees everything that was answered."""
    async with open_engine(path) as engine:
        for _ in range(20):
            (receipt,) = await engine.submit([envelope()])
            assert query_file(path, "SELECT state FROM jobs WHERE job_id = ?", receipt.job_id) == [("queued",)]


def count_statements(statements: list[str]) -> int:
    """Count statements without the check for other processes' commits, which runs by the clock."""
    return sum("data_version" not in statement for statement in statements)


@pytest.mark.parametrize("size", [1, 7, MAX_BATCH])
async def test_a_batch_of_any_size_takes_the_same_few_statements(path: Path, size: int) -> None:
    """Row by row, a busy event loop would make a batch of 500 take seconds."""
    async with open_engine(path) as engine:
        await start_one(engine)
        statements: list[str] = []
        await trace(engine, statements)
        await engine.submit([envelope() for _ in range(size)])
        assert count_statements(statements) <= 8
        statements.clear()
        claims = await engine.claim("w1", [QUEUE], size, 0)
        assert len(claims) == size
        assert count_statements(statements) <= 8
        statements.clear()
        await engine.settle([Settlement(claim, Succeed(b"1"), 1) for claim in claims])
        assert count_statements(statements) <= 8


async def test_idle_workers_write_nothing(path: Path) -> None:
    clock = ManualClock()
    async with open_engine(path, clock) as engine:
        await engine.submit([envelope(delay_ms=60_000)])
        await engine.claim("w1", [QUEUE], 1, 0)
        statements: list[str] = []
        await trace(engine, statements)
        for _ in range(3):
            assert await engine.claim("w1", [QUEUE], 1, 0) == []
            assert await engine.reclaim("w1", [QUEUE], 10) == []
            assert (await engine.promote([QUEUE], 10)).count == 0
            assert await engine.recover_claims("w1", [QUEUE], ()) == []
        assert [text for text in statements if not text.startswith(("SELECT", "PRAGMA"))] == []


async def test_a_waiting_claim_gets_a_due_job_without_a_promoter(path: Path) -> None:
    clock = ManualClock()
    async with open_engine(path, clock) as engine:
        await engine.submit([envelope(delay_ms=60_000)])
        waiting = asyncio.create_task(engine.claim("w1", [QUEUE], 1, 30_000))
        await engine.claim("w2", [QUEUE], 1, 0)
        clock.advance(60.0)
        assert len(await asyncio.wait_for(waiting, 10)) == 1
        assert engine.counters.promoted == 1


async def test_a_cancelled_claim_is_dropped_or_can_be_recovered(path: Path) -> None:
    async with open_engine(path) as engine:
        await engine.submit([envelope()])
        release = await hold_writer(engine)
        waiting = asyncio.create_task(engine.claim("w1", [QUEUE], 1, 0))
        await wait_enqueued(engine, 1)
        waiting.cancel()
        recovered = asyncio.create_task(engine.recover_claims("w1", [QUEUE], ()))
        await asyncio.sleep(0)
        release()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        # Either it was dropped before it began, or its claim is recovered.
        assert len(await recovered) + len(await engine.claim("w1", [QUEUE], 1, 0)) == 1


async def test_engines_of_one_process_share_a_writer(path: Path) -> None:
    async with open_engine(path) as one, open_engine(path) as two:
        assert one._store._writer is two._store._writer
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast-writer")]
        assert len(names) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-writer")]


async def test_no_engine_of_a_process_is_always_the_first_to_claim(path: Path) -> None:
    first: list[str] = []
    async with open_engine(path) as one, open_engine(path) as two:
        for _ in range(40):
            waiting = [asyncio.create_task(engine.claim("w", [QUEUE], 1, 30_000)) for engine in (one, two)]
            # The writer answers in order: after this, both have found nothing and wait for a commit.
            assert await one.claim("w", [QUEUE], 1, 0) == []
            receipt = await one.submit([envelope()])
            await one.submit([envelope()])
            claimed = [claims[0].job_id for claims in await asyncio.gather(*waiting)]
            first.append(("one", "two")[claimed.index(receipt[0].job_id)])
    assert set(first) == {"one", "two"}


async def test_the_file_is_durable(path: Path) -> None:
    def pragmas(transaction: Transaction) -> tuple[str, int]:
        connection: sqlite3.Connection = transaction._connection
        (journal,) = connection.execute("PRAGMA journal_mode").fetchone()
        (synchronous,) = connection.execute("PRAGMA synchronous").fetchone()
        return journal, synchronous

    async with open_engine(path) as engine:
        assert await engine._store.write(pragmas, lazy=True) == ("wal", 2)
