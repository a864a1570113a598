"""`process=True`: real child processes, reused while they behave, killed when their job is over from outside."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast, State, Worker
from holdfast.errors import InvalidOption
from tests.execution import process_tasks as tasks
from tests.processes import ProcessId
from tests.worker.support import eventually, working


@pytest.fixture
async def app(url: str) -> AsyncIterator[Holdfast]:
    tasks.app.configure(url=url, heartbeat_interval_s=0.1, reclaim_interval_s=0.1)
    async with tasks.app:
        yield tasks.app


async def failure(app: Holdfast, job: Any) -> tuple[State, str, str]:
    view = await app.engine.wait_final(job.queue, job.id, 20_000)
    assert view is not None
    assert view.failure is not None
    return view.state, view.failure.code, view.failure.message


async def test_jobs_run_in_children_that_are_used_again(app: Holdfast) -> None:
    async with working(app):
        first = await tasks.pid.submit("ä")
        pid, word, job_id = await first.result(60)
        child = ProcessId.of(pid)
        assert (word, job_id) == ("ä", first.id)
        assert pid != os.getpid()
        assert (await (await tasks.pid.submit("b")).result(60))[0] == pid
        assert await (await tasks.nap.submit(0)).result(60) == pid
        assert await (await tasks.big.submit(500_000)).result(60) == "x" * 500_000
    await eventually(lambda: not child.is_running(), "the child to end with its worker")


async def test_children_run_side_by_side(app: Holdfast, tmp_path: Path) -> None:
    async with working(app):
        jobs = [await tasks.meet.submit(str(tmp_path), 3) for _ in range(3)]
        assert len({await job.result(60) for job in jobs}) == 3


@pytest.mark.parametrize("task", [tasks.hang, tasks.hold_everything], ids=lambda task: task.name)
async def test_a_child_is_killed_when_its_time_is_up(app: Holdfast, tmp_path: Path, task: Any) -> None:
    note = tmp_path / "pid"
    async with working(app) as worker:
        state, code, _ = await failure(app, await task.submit(str(note)))
        assert (state, code) == (State.FAILED, "TASK_TIMEOUT")
        child = ProcessId.parse(note.read_text())
        assert not child.is_running()
        await eventually(lambda: worker.running == 0)
        await (await tasks.pid.submit("x")).result(60)
        assert not child.is_running()


async def test_a_child_is_killed_when_its_job_is_cancelled(app: Holdfast, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    async with working(app) as worker:
        job = await tasks.wait_for_end.submit(str(note))
        child = await _child_of(note)
        await job.cancel()
        await eventually(lambda: worker.running == 0)
        await eventually(lambda: not child.is_running(), "the child to end")
        assert await job.state() is State.CANCELLED


async def test_a_drain_in_a_hurry_kills_children_and_gives_their_jobs_back(app: Holdfast, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    async with working(app) as worker:
        job = await tasks.wait_for_end.submit(str(note))
        child = await _child_of(note)
        worker.drain()
        worker.drain()
    await eventually(lambda: not child.is_running(), "the child to end")
    assert await job.state() is State.QUEUED


async def test_a_child_that_dies_is_a_failure_that_retries(app: Holdfast) -> None:
    async with working(app):
        job = await tasks.die.submit(7)
        state, code, message = await failure(app, job)
        assert (state, code) == (State.FAILED, "PROCESS_DIED")
        assert message == "the child process exited (7) before the task was done"
        assert len(await job.history()) == 2


async def test_a_child_that_is_killed_from_outside_says_so(app: Holdfast, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    async with working(app):
        job = await tasks.wait_for_end.submit(str(note))
        os.kill((await _child_of(note)).pid, signal.SIGKILL)
        _, code, message = await failure(app, job)
        assert (code, "was killed by signal 9" in message) == ("PROCESS_DIED", True)


async def test_a_child_that_died_at_rest_is_not_charged_to_the_next_job(app: Holdfast) -> None:
    async with working(app):
        child = ProcessId.of((await (await tasks.pid.submit("a")).result(60))[0])
        os.kill(child.pid, signal.SIGKILL)
        await eventually(lambda: not child.is_running())
        job = await tasks.pid.submit("b")
        await job.result(60)
        assert (await job.info()).attempt == 1


async def test_errors_in_a_child_are_classified_there(app: Holdfast) -> None:
    async with working(app):
        state, code, message = await failure(app, await tasks.refuse.submit())
        assert (state, code, message) == (State.FAILED, "TASK_FATAL", "not like this")


async def test_a_task_that_no_child_could_find_is_refused_at_the_start(app: Holdfast, url: str) -> None:
    hidden = Holdfast(url)

    @hidden.task(process=True)
    def inside() -> None: ...

    with pytest.raises(InvalidOption, match="at the module's top level"):
        await Worker(hidden).run()


def test_tasks_of_a_script_run_in_children_too(tmp_path: Path, url: str) -> None:
    """The module is `__main__`: a child loads its file, without running what is meant for the main program."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio, os
        from holdfast import Holdfast, Worker

        app = Holdfast({url!r})

        @app.task(process=True)
        def where() -> int:
            return os.getpid()

        async def main() -> None:
            async with app:
                worker = Worker(app)
                running = asyncio.create_task(worker.run())
                job = await where.submit()
                print("child" if await job.result(60) != os.getpid() else "same")
                worker.drain()
                await running

        if __name__ == "__main__":
            asyncio.run(main())
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=50, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("child\n", "")


def test_a_child_ends_with_a_worker_that_had_not_read_all() -> None:
    """The connection is reset then, instead of closed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        code = f"from holdfast.execution.processes import main; main({theirs.fileno()})"
        child = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
        theirs.send(b"unread")
        theirs.close()
        ours.close()
    try:
        assert child.wait(20) == 0
    finally:
        child.kill()


def test_children_do_not_outlive_a_killed_worker(tmp_path: Path, url: str) -> None:
    note, script = tmp_path / "pid", tmp_path / "killed.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio, os, pathlib, time
        from holdfast import Holdfast, Worker

        app = Holdfast({url!r})

        @app.task(process=True)
        def linger() -> None:
            pathlib.Path({str(note)!r}).write_text(str(os.getpid()))
            time.sleep(60)

        async def main() -> None:
            async with app:
                await linger.submit()
                await Worker(app).run()

        if __name__ == "__main__":
            asyncio.run(main())
        """)
    )
    worker = subprocess.Popen([sys.executable, str(script)], cwd=tmp_path)
    try:
        asyncio.run(_until_written(note))
        # The worker still runs, and so does its child.
        child = ProcessId.of(int(note.read_text()))
    finally:
        worker.kill()
        worker.wait()
    asyncio.run(_until_ended(child))


async def _child_of(note: Path) -> ProcessId:
    """The process that has written the note."""
    return ProcessId.parse(await eventually(lambda: note.exists() and note.read_text(), "the child to start"))


async def _until_written(note: Path) -> None:
    await eventually(lambda: note.exists() and note.read_text(), "the child to start")


async def _until_ended(child: ProcessId) -> None:
    await eventually(lambda: not child.is_running(), "the child to end")
