"""Several processes on one file: they wake each other, take turns, and survive each other's death."""

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
from tests.engine.sqlite.rig import QUEUE, envelope, look, opened

ROOT = Path(__file__).parents[3]
SOON_S = 60.0


class Child:
    """Another process on the same file."""

    def __init__(self, what: str, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.sqlite.other_process", what, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    async def hear(self) -> Any:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), SOON_S)
        assert line, "the other process ended early"
        return json.loads(line)

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
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

    def begin(what: str) -> Child:
        children.append(Child(what, path))
        return children[-1]

    yield begin
    for child in children:
        child.end()


async def test_an_idle_worker_is_woken_by_another_process(path: Path, start: Start) -> None:
    async with opened(path) as engine:
        child = start("submit")
        assert await child.hear() == "ready"
        for _ in range(3):
            waiting = asyncio.create_task(engine.claim("w1", [QUEUE], 1, 60_000))
            await engine.claim("w2", [QUEUE], 1, 0)
            child.tell("go")
            (claim,) = await asyncio.wait_for(waiting, SOON_S)
            assert claim.job_id == await child.hear()


@pytest.mark.parametrize(("word", "state"), [("succeed", State.SUCCEEDED), ("cancel", State.CANCELLED)])
async def test_who_waits_for_an_end_is_woken_by_another_process(
    path: Path, start: Start, word: str, state: State
) -> None:
    async with opened(path) as engine:
        job = envelope()
        await engine.submit([job])
        child = start("finish")
        assert await child.hear() == job.job_id
        waiting = asyncio.create_task(engine.wait_final(QUEUE, job.job_id, 60_000))
        listening = asyncio.create_task(engine.listen([QUEUE], 60_000))
        # A later question is answered, so both have taken their first look.
        await engine.get(QUEUE, [job.job_id])
        child.tell(word)
        view = await asyncio.wait_for(waiting, SOON_S)
        assert view is not None
        assert view.state is state
        if word == "cancel":
            assert await asyncio.wait_for(listening, SOON_S) == [CancelledNotice(QUEUE, job.job_id)]
        else:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


async def test_an_end_in_another_process_is_noticed_while_an_earlier_look_goes_on(
    path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(path) as engine:
        store, job = engine._store, envelope()
        await engine.submit([job])
        child = start("finish")
        assert await child.hear() == job.job_id
        asked, answered, heard = asyncio.Event(), asyncio.Event(), asyncio.Event()
        rows, tell = store.reader.rows, store.waiters.notify

        async def slow_rows(name: str, *arguments: Any, **values: Any) -> Any:
            found = await rows(name, *arguments, **values)
            if name == "finished_among":
                asked.set()
                await answered.wait()
            return found

        def watched_tell(effects: CommitNotices) -> None:
            tell(effects)
            if effects.external:
                heard.set()

        monkeypatch.setattr(store.reader, "rows", slow_rows)
        monkeypatch.setattr(store.waiters, "notify", watched_tell)
        waiting = asyncio.create_task(engine.wait_final(QUEUE, job.job_id, 10 * 60_000))
        await engine.get(QUEUE, [job.job_id])
        store._notify(CommitNotices(external=True))
        await asyncio.wait_for(asked.wait(), SOON_S)
        heard.clear()
        child.tell("succeed")
        await asyncio.wait_for(heard.wait(), SOON_S)
        assert await child.hear() == "succeed"
        answered.set()
        view = await asyncio.wait_for(waiting, SOON_S)
        assert view is not None
        assert view.state is State.SUCCEEDED


async def test_processes_share_the_work_and_no_job_runs_twice(path: Path, start: Start) -> None:
    async with opened(path) as engine:
        submitted = [receipt.job_id for receipt in await engine.submit([envelope() for _ in range(1_000)])]
        children = [start("drain") for _ in range(2)]
        for child in children:
            assert await child.hear() == "ready"
        done = [job_id for child in children for job_id in await child.hear()]
        assert sorted(done) == sorted(submitted)
        assert (await engine.stats(QUEUE)).states == {}


async def test_a_process_killed_in_mid_write_holds_nobody_up(path: Path, start: Start) -> None:
    async with opened(path, visibility_timeout_ms=200) as engine:
        job = envelope()
        await engine.submit([job])
        child = start("hang")
        assert await child.hear() == "ready"
        blocked = asyncio.create_task(engine.submit([envelope(queue="other")]))
        # Reading goes on meanwhile.
        assert await engine.queues() == [QUEUE]
        assert not blocked.done()
        child.process.send_signal(signal.SIGKILL)
        assert await asyncio.wait_for(blocked, SOON_S)
        assert look(path, "SELECT worker FROM workers WHERE worker = 'half-written'") == []

        deadline = time.monotonic() + SOON_S
        # The child leased it for the default 30 s; our own clock decides when that is over.
        assert look(path, "SELECT state, worker FROM jobs WHERE job_id = ?", job.job_id) == [("running", "child")]
        await engine._store.write(
            lambda transaction: transaction._connection.execute(
                "UPDATE jobs SET lease_expires_at = 1 WHERE worker = 'child'"
            )
        )
        while not (claims := await engine.reclaim("w2", [QUEUE], 10)):
            assert time.monotonic() < deadline
        assert [claim.job_id for claim in claims] == [job.job_id]


async def test_a_busy_process_does_not_starve_another(path: Path, start: Start) -> None:
    async with opened(path) as engine:
        child = start("hammer")
        assert await child.hear() == "ready"
        # SQLite's own waiting took 1.2 s and more here; one turn of the other process is a few milliseconds. A machine
        # that is busy otherwise may be slow once, but not every time.
        assert min([await _slowest(engine) for _ in range(3)]) < 1.0
        assert child.process.poll() is None


async def _slowest(engine: SqliteEngine) -> float:
    slowest = 0.0
    for _ in range(30):
        began = time.monotonic()
        await engine.submit([envelope()])
        slowest = max(slowest, time.monotonic() - began)
    return slowest


def fork_and_report(path: str, answers: Any) -> None:
    """In a forked child: the parent's locks are gone, and an engine of one's own works."""

    async def work() -> str:
        async with opened(Path(path)) as engine:
            (receipt,) = await engine.submit([envelope()])
            return receipt.job_id

    answers.put(asyncio.run(work()))


async def test_a_forked_child_can_open_the_file_anew(path: Path) -> None:
    async with opened(path) as engine:
        await engine.submit([envelope()])
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        process = context.Process(target=fork_and_report, args=(str(path), answers))
        with warnings.catch_warnings():
            # Later Pythons warn of any fork with threads; that is what is tested here.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        job_id = await asyncio.to_thread(answers.get, True, SOON_S)
        await asyncio.to_thread(process.join, SOON_S)
        assert process.exitcode == 0
        assert (await engine.get(QUEUE, [job_id]))[0] is not None
        await engine.submit([envelope()])
        answers.close()


def test_a_forked_child_keeps_no_lock_of_its_parent(path: Path, start: Start) -> None:
    """The holder of the turn dies, and a child of it lives on: the turn is free all the same."""
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
    keep, end = os.pipe()
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script, str(path)],
        stdin=keep,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.wait()
    try:
        os.kill(child, 0)
        turnstile = WriteLock(path)
        turnstile.acquire()
        turnstile.release()
        turnstile.close()
        os.kill(child, 0)
    finally:
        os.close(end)
        os.close(keep)
        parent.stdout.close()


def test_who_has_written_goes_to_the_end_of_the_queue(path: Path) -> None:
    one, two = WriteLock(path), WriteLock(path)
    order: list[str] = []

    def wait_and_write() -> None:
        two.acquire()
        order.append("two")
        two.release()

    one.acquire()
    waiting = threading.Thread(target=wait_and_write)
    waiting.start()
    wait_until_taken(Path(f"{path}-queue"))
    one.release()
    # At once again: without a queue it would nearly always be first.
    one.acquire()
    order.append("one")
    one.release()
    waiting.join(SOON_S)
    assert order == ["two", "one"]
    one.close()
    two.close()


def wait_until_taken(lock: Path) -> None:
    """Until somebody holds this lock."""
    deadline = time.monotonic() + SOON_S
    with lock.open() as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            fcntl.flock(file, fcntl.LOCK_UN)
    raise AssertionError(f"nobody waits for {lock}")
