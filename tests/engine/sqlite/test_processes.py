"""Several processes on one file: they wake each other, alternate writes, and survive each other's crashes."""

from __future__ import annotations

import asyncio
import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.states import State
from holdfast.engine.port.reads import CancelledNotice
from holdfast.engine.sqlite.engine import SqliteEngine
from holdfast.sqlite.connection import WriteLock
from holdfast.sqlite.transaction import CommitNotices
from tests.engine.sqlite.rig import QUEUE, envelope, open_engine, query_file

ROOT = Path(__file__).parents[3]
SOON_S = 60.0


class Child:
    """Another process on the same file."""

    def __init__(self, command: str, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.sqlite.other_process", command, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    async def read_line(self) -> Any:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), SOON_S)
        assert line, "the other process ended early"
        return json.loads(line)

    def send_line(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


Start = Callable[[str], Child]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "holdfast.db"


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    children: list[Child] = []

    def start_child(command: str) -> Child:
        children.append(Child(command, path))
        return children[-1]

    yield start_child
    for child in children:
        child.end()


async def test_an_idle_worker_is_woken_by_another_process(path: Path, start: Start) -> None:
    async with open_engine(path) as engine:
        child = start("submit")
        assert await child.read_line() == "ready"
        for _ in range(3):
            waiting = asyncio.create_task(engine.claim("w1", [QUEUE], 1, 60_000))
            await engine.claim("w2", [QUEUE], 1, 0)
            child.send_line("go")
            (claim,) = await asyncio.wait_for(waiting, SOON_S)
            assert claim.job_id == await child.read_line()


@pytest.mark.parametrize(("command", "state"), [("succeed", State.SUCCEEDED), ("cancel", State.CANCELLED)])
async def test_a_waiter_is_woken_by_another_process(path: Path, start: Start, command: str, state: State) -> None:
    async with open_engine(path) as engine:
        job = envelope()
        await engine.submit([job])
        child = start("finish")
        assert await child.read_line() == job.job_id
        waiting = asyncio.create_task(engine.wait_final(QUEUE, job.job_id, 60_000))
        listening = asyncio.create_task(engine.listen([QUEUE], 60_000))
        # A later query is answered, so both waiters have done their first read.
        await engine.get(QUEUE, [job.job_id])
        child.send_line(command)
        info = await asyncio.wait_for(waiting, SOON_S)
        assert info is not None
        assert info.state is state
        if command == "cancel":
            assert await asyncio.wait_for(listening, SOON_S) == [CancelledNotice(QUEUE, job.job_id)]
        else:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


async def test_an_end_in_another_process_is_noticed_during_an_earlier_read(
    path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_engine(path) as engine:
        store, job = engine._store, envelope()
        await engine.submit([job])
        child = start("finish")
        assert await child.read_line() == job.job_id
        read_started, may_return, notified = asyncio.Event(), asyncio.Event(), asyncio.Event()
        rows, notify = store.reader.rows, store.waiters.notify

        async def slow_rows(name: str, *arguments: Any, **values: Any) -> Any:
            found = await rows(name, *arguments, **values)
            if name == "finished_among":
                read_started.set()
                await may_return.wait()
            return found

        def watch_notify(effects: CommitNotices) -> None:
            notify(effects)
            if effects.external:
                notified.set()

        monkeypatch.setattr(store.reader, "rows", slow_rows)
        monkeypatch.setattr(store.waiters, "notify", watch_notify)
        waiting = asyncio.create_task(engine.wait_final(QUEUE, job.job_id, 10 * 60_000))
        await engine.get(QUEUE, [job.job_id])
        store._notify(CommitNotices(external=True))
        await asyncio.wait_for(read_started.wait(), SOON_S)
        notified.clear()
        child.send_line("succeed")
        await asyncio.wait_for(notified.wait(), SOON_S)
        assert await child.read_line() == "succeed"
        may_return.set()
        info = await asyncio.wait_for(waiting, SOON_S)
        assert info is not None
        assert info.state is State.SUCCEEDED


async def test_processes_share_the_work_and_no_job_runs_twice(path: Path, start: Start) -> None:
    async with open_engine(path) as engine:
        submitted = [receipt.job_id for receipt in await engine.submit([envelope() for _ in range(1_000)])]
        children = [start("drain") for _ in range(2)]
        for child in children:
            assert await child.read_line() == "ready"
        done = [job_id for child in children for job_id in await child.read_line()]
        assert sorted(done) == sorted(submitted)
        assert (await engine.stats(QUEUE)).states == {}


async def test_a_process_killed_in_mid_write_blocks_no_other_process(path: Path, start: Start) -> None:
    async with open_engine(path, visibility_timeout_ms=200) as engine:
        job = envelope()
        await engine.submit([job])
        child = start("hang")
        assert await child.read_line() == "ready"
        blocked = asyncio.create_task(engine.submit([envelope(queue="other")]))
        # Reads continue meanwhile.
        assert await engine.queues() == [QUEUE]
        assert not blocked.done()
        child.process.send_signal(signal.SIGKILL)
        assert await asyncio.wait_for(blocked, SOON_S)
        assert query_file(path, "SELECT worker FROM workers WHERE worker = 'half-written'") == []

        deadline = time.monotonic() + SOON_S
        # The child leased it for the default 30 s; this engine's clock decides when that has expired.
        assert query_file(path, "SELECT state, worker FROM jobs WHERE job_id = ?", job.job_id) == [("running", "child")]
        await engine._store.write(
            lambda transaction: transaction._connection.execute(
                "UPDATE jobs SET lease_expires_at = 1 WHERE worker = 'child'"
            )
        )
        while not (claims := await engine.reclaim("w2", [QUEUE], 10)):
            assert time.monotonic() < deadline
        assert [claim.job_id for claim in claims] == [job.job_id]


async def test_a_busy_process_does_not_starve_another(path: Path, start: Start) -> None:
    async with open_engine(path) as engine:
        child = start("hammer")
        assert await child.read_line() == "ready"
        # SQLite's own busy handler took 1.2 s and more here; one write of the other process takes a few milliseconds.
        # A machine that is busy otherwise may be slow once, but not every time.
        assert min([await _slowest(engine) for _ in range(3)]) < 1.0
        assert child.process.poll() is None


async def _slowest(engine: SqliteEngine) -> float:
    slowest = 0.0
    for _ in range(30):
        started = time.monotonic()
        await engine.submit([envelope()])
        slowest = max(slowest, time.monotonic() - started)
    return slowest


def fork_and_report(path: str, answers: Any) -> None:
    """In a forked child: the parent's locks are released, and a new engine works."""

    async def work() -> str:
        async with open_engine(Path(path)) as engine:
            (receipt,) = await engine.submit([envelope()])
            return receipt.job_id

    answers.put(asyncio.run(work()))


async def test_a_forked_child_can_open_the_file_again(path: Path) -> None:
    async with open_engine(path) as engine:
        await engine.submit([envelope()])
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        process = context.Process(target=fork_and_report, args=(str(path), answers))
        with warnings.catch_warnings():
            # Later Python versions warn about any fork with threads; that is what is tested here.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        job_id = await asyncio.to_thread(answers.get, True, SOON_S)
        await asyncio.to_thread(process.join, SOON_S)
        assert process.exitcode == 0
        assert (await engine.get(QUEUE, [job_id]))[0] is not None
        await engine.submit([envelope()])
        answers.close()


def test_a_forked_child_does_not_keep_its_parents_lock(path: Path, start: Start) -> None:
    """The process that holds the write lock is killed while its child still runs: the lock is released."""
    script = (
        "import os, sys, time, threading\n"
        "from pathlib import Path\n"
        "from holdfast.engine.sqlite.schema import prepare_schema\n"
        "from holdfast.sqlite.writer import acquire_writer\n"
        "writer = acquire_writer(Path(sys.argv[1]), prepare=prepare_schema)\n"
        "writer._turnstile.acquire()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
        "print(child, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    read_end, write_end = os.pipe()
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script, str(path)],
        stdin=read_end,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.wait()
    try:
        os.kill(child, 0)
        lock = WriteLock(path)
        lock.acquire()
        lock.release()
        lock.close()
        os.kill(child, 0)
    finally:
        os.close(write_end)
        os.close(read_end)
        parent.stdout.close()


def test_a_writer_that_has_written_goes_to_the_end_of_the_queue(path: Path) -> None:
    one, two = WriteLock(path), WriteLock(path)
    order: list[str] = []

    def wait_and_write() -> None:
        two.acquire()
        order.append("two")
        two.release()

    one.acquire()
    waiting = threading.Thread(target=wait_and_write)
    waiting.start()
    wait_until_locked(Path(f"{path}-queue"))
    one.release()
    # Immediately again: without a queue it would nearly always be first.
    one.acquire()
    order.append("one")
    one.release()
    waiting.join(SOON_S)
    assert order == ["two", "one"]
    one.close()
    two.close()


def wait_until_locked(lock: Path) -> None:
    """Wait until another file descriptor holds this lock."""
    deadline = time.monotonic() + SOON_S
    with lock.open() as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            fcntl.flock(file, fcntl.LOCK_UN)
    raise AssertionError(f"{lock} was not locked")
