"""A file that is locked, full, missing or closed: a clear error, and nothing lost or partially applied."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
from os import rename
from pathlib import Path

import pytest

from holdfast.core.job import Meta
from holdfast.core.states import State
from holdfast.core.verdict import SettleResult, Succeed
from holdfast.engine.port.jobs import EngineOptions
from holdfast.engine.sqlite import schema
from holdfast.engine.sqlite.engine import SqliteEngine
from holdfast.errors import EngineUnavailable, InvalidOption, InvalidPayload, UnknownJob
from holdfast.sqlite import connection, writer
from holdfast.sqlite.connection import WriteLock
from holdfast.sqlite.transaction import Transaction
from tests.engine.sqlite.rig import QUEUE, envelope, exists, open_engine, query_file, settle, start_one


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "holdfast.db"


async def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="directory must exist"):
        async with open_engine(tmp_path / "nowhere" / "holdfast.db"):
            pass


async def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable):
        async with open_engine(tmp_path):
            pass


def test_an_impossible_path_is_an_invalid_option() -> None:
    with pytest.raises(InvalidOption):
        SqliteEngine("jobs\0.db", EngineOptions())


async def test_an_engine_that_is_not_open_raises(path: Path) -> None:
    engine = SqliteEngine(path, EngineOptions())
    for work in (engine.submit([envelope()]), engine.queues()):
        with pytest.raises(EngineUnavailable, match="not open"):
            await work
    await engine.open()
    await engine.open()
    await engine.close()
    await engine.close()
    with pytest.raises(EngineUnavailable, match="not open"):
        await engine.submit([envelope()])
    await engine.open()
    assert await engine.submit([envelope()])
    await engine.close()


async def test_closing_wakes_all_waiters(path: Path) -> None:
    async with open_engine(path) as engine:
        claim = await start_one(engine)
        waiting = [
            asyncio.create_task(engine.claim("w2", [QUEUE], 1, 60_000)),
            asyncio.create_task(engine.wait_final(QUEUE, claim.job_id, 60_000)),
            asyncio.create_task(engine.listen([QUEUE], 60_000)),
        ]
        # Once a later query is answered, each waiter has done its first read.
        await engine.listen([QUEUE], 0)
        await engine.claim("w3", [QUEUE], 1, 0)
        await engine.close()
        for task in waiting:
            with pytest.raises(EngineUnavailable, match="not open"):
                await asyncio.wait_for(task, 10)


async def test_a_file_locked_by_another_program_raises(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BUSY_TIMEOUT_MS", 50)
    async with open_engine(path) as engine:
        claim = await start_one(engine)
        shell = sqlite3.connect(path, isolation_level=None)
        shell.execute("BEGIN IMMEDIATE")
        with pytest.raises(EngineUnavailable, match="locked") as error:
            await engine.submit([envelope()])
        assert isinstance(error.value.__cause__, sqlite3.OperationalError)
        # Readers do not wait for writers.
        assert (await engine.stats(QUEUE)).states == {State.RUNNING: 1}
        shell.execute("ROLLBACK")
        shell.close()
        assert await settle(engine, claim, Succeed(b"1")) is SettleResult.APPLIED
        assert await engine.submit([envelope()])


async def test_a_full_disk_refuses_writes_and_keeps_data(path: Path) -> None:
    def limit_pages(transaction: Transaction, pages: int) -> None:
        transaction._connection.execute(f"PRAGMA max_page_count = {pages}")

    async with open_engine(path) as engine:
        claim = await start_one(engine)
        await engine._store.write(limit_pages, 1)
        big = b'{"text":"' + b"x" * 1_000_000 + b'"}'
        accepted = [envelope(), envelope()]
        good, bad = await asyncio.gather(
            engine.submit(accepted), engine.submit([envelope(payload=big)]), return_exceptions=True
        )
        assert isinstance(bad, EngineUnavailable)
        assert "disk is full" in str(bad)
        await engine._store.write(limit_pages, 1_000_000)
        if isinstance(good, BaseException):
            good = await engine.submit(accepted)
        assert [receipt.job_id for receipt in good] == [item.job_id for item in accepted]
        assert await settle(engine, claim, Succeed(b"1")) is SettleResult.APPLIED
        assert len(await engine.claim("w1", [QUEUE], 10, 0)) == 2
    assert query_file(path, "PRAGMA integrity_check") == [("ok",)]


async def test_a_deleted_file_accepts_no_more_jobs(path: Path) -> None:
    async with open_engine(path) as engine:
        claim = await start_one(engine)
        moved = path.with_name("aside.db")
        rename(path, moved)
        with pytest.raises(EngineUnavailable):
            await engine.submit([envelope()])
        assert not exists(path)
        rename(moved, path)
        assert await settle(engine, claim, Succeed(b"1")) is SettleResult.APPLIED


async def test_a_replaced_file_is_noticed_before_writing(path: Path, tmp_path: Path) -> None:
    async with open_engine(path) as engine:
        await start_one(engine)
        rename(path, tmp_path / "aside.db")
        for suffix in ("-wal", "-shm"):
            rename(f"{path}{suffix}", f"{tmp_path / 'moved.db'}{suffix}")
        connection.open_writer(path, schema.prepare_schema).close()
        with pytest.raises(EngineUnavailable, match="moved or deleted"):
            await engine.submit([envelope()])
        fresh = envelope()
        await engine.submit([fresh])
        assert query_file(path, "SELECT job_id FROM jobs") == [(fresh.job_id,)]


async def test_a_store_that_does_not_answer_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "ANSWER_TIMEOUT_S", 0.05)
    async with open_engine(path) as engine:
        # Another process has stopped in the middle of a write.
        other = WriteLock(path)
        other.acquire()
        with pytest.raises(EngineUnavailable, match="did not answer within"):
            await engine.submit([envelope()])
        other.release()
        other.close()
        monkeypatch.setattr(writer, "ANSWER_TIMEOUT_S", 10)
        assert await engine.submit([envelope()])


async def test_a_batch_with_unstorable_text_is_refused(path: Path) -> None:
    async with open_engine(path) as engine:
        with pytest.raises(InvalidPayload, match="UTF-8"):
            await engine.submit([envelope(), envelope(payload=b"\xff\xfe")])
        with pytest.raises(InvalidOption, match="priority"):
            await engine.submit([envelope(), envelope(meta=Meta(priority=9))])
        with pytest.raises(InvalidOption, match="position"):
            await engine.read_feed(QUEUE, "yesterday", 10)
        assert await engine.queues() == []


@pytest.mark.parametrize(
    "text", ["", "no json", '"\\ud800"', '{"a":"\x00\x1f"}', "\u2028'\"; DROP TABLE jobs", "9" * 40]
)
async def test_any_text_is_stored_unchanged(path: Path, text: str) -> None:
    async with open_engine(path) as engine:
        claim = await start_one(engine, payload=text.encode(), task=text, trace_id=text, idempotency_key=text)
        assert (claim.payload, claim.task, claim.trace_id) == (text.encode(), text, text)
        assert claim.idempotency_key == (text or claim.job_id)
        await settle(engine, claim, Succeed(text.encode()))
        (info,) = await engine.get(QUEUE, [claim.job_id])
        assert info is not None
        assert info.result == text.encode()
        events = [event for entry in await engine.read_feed(QUEUE, "", 10) for event in entry.events]
        assert (events[0].data or {})["payload"] == (events[2].data or {})["result"] == text


async def test_a_temporary_database_is_shared_by_clones_and_deleted_with_them() -> None:
    engine = SqliteEngine(":memory:", EngineOptions())
    path = engine._store.file.path
    await engine.open()
    sibling = engine.clone()
    await sibling.open()
    await engine.submit([envelope()])
    assert len(await sibling.claim("w1", [QUEUE], 1, 0)) == 1
    assert any(not finding.ok and finding.warning for finding in await engine.diagnose([]))
    await engine.close()
    await sibling.close()
    assert exists(path)
    del engine, sibling
    gc.collect()
    assert not exists(path.parent)


async def test_two_temporary_databases_are_independent() -> None:
    one, two = SqliteEngine(":memory:", EngineOptions()), SqliteEngine(":memory:", EngineOptions())
    await one.open()
    await two.open()
    await one.submit([envelope()])
    assert await two.queues() == []
    await one.close()
    await two.close()


async def test_a_healthy_file_passes_every_check(path: Path) -> None:
    async with open_engine(path) as engine:
        findings = await engine.diagnose([QUEUE])
        assert {finding.check for finding in findings} >= {
            "journal mode",
            "durability",
            "integrity",
            "writable",
            "disk",
        }
        assert [finding for finding in findings if not finding.ok and finding.check != "disk"] == []


async def test_a_broken_invariant_is_an_error_not_a_write(path: Path) -> None:
    def break_invariant(transaction: Transaction) -> None:
        transaction._connection.execute("UPDATE jobs SET previous_state = state, state = 'failed', finished_at = 1")

    async with open_engine(path) as engine:
        await engine.submit([envelope()])
        with pytest.raises(EngineUnavailable, match="invariant"):
            await engine._store.write(break_invariant)
        with pytest.raises(UnknownJob):
            await engine.move(QUEUE, "unknown", State.CANCELLED, actor="ann", reason="")
        assert len(await engine.claim("w1", [QUEUE], 1, 0)) == 1
