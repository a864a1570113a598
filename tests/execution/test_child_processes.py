"""`process=True`: real child processes, reused between jobs, killed when their job is stopped from outside."""

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


async def wait_failure(app: Holdfast, job: Any) -> tuple[State, str, str]:
    info = await app.engine.wait_final(job.queue, job.id, 20_000)
    assert info is not None
    assert info.failure is not None
    return info.state, info.failure.code, info.failure.message


async def test_jobs_run_in_child_processes_that_are_reused(app: Holdfast) -> None:
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


async def test_child_processes_run_concurrently(app: Holdfast, tmp_path: Path) -> None:
    async with working(app):
        jobs = [await tasks.meet.submit(str(tmp_path), 3) for _ in range(3)]
        assert len({await job.result(60) for job in jobs}) == 3


@pytest.mark.parametrize("task", [tasks.hang, tasks.hold_gil], ids=lambda task: task.name)
async def test_a_child_is_killed_at_its_timeout(app: Holdfast, tmp_path: Path, task: Any) -> None:
    note = tmp_path / "pid"
    async with working(app) as worker:
        state, code, _ = await wait_failure(app, await task.submit(str(note)))
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
        child = await _wait_child(note)
        await job.cancel()
        await eventually(lambda: worker.running == 0)
        await eventually(lambda: not child.is_running(), "the child to end")
        assert await job.state() is State.CANCELLED


async def test_an_immediate_drain_kills_children_and_releases_their_jobs(app: Holdfast, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    async with working(app) as worker:
        job = await tasks.wait_for_end.submit(str(note))
        child = await _wait_child(note)
        worker.drain()
        worker.drain()
    await eventually(lambda: not child.is_running(), "the child to end")
    assert await job.state() is State.QUEUED


async def test_a_child_that_exits_is_a_failure_that_is_retried(app: Holdfast) -> None:
    async with working(app):
        job = await tasks.die.submit(7)
        state, code, message = await wait_failure(app, job)
        assert (state, code) == (State.FAILED, "PROCESS_DIED")
        assert message == "the child process exited (7) before the task was done"
        assert len(await job.history()) == 2


async def test_a_child_that_is_killed_from_outside_is_reported_with_its_signal(app: Holdfast, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    async with working(app):
        job = await tasks.wait_for_end.submit(str(note))
        os.kill((await _wait_child(note)).pid, signal.SIGKILL)
        _, code, message = await wait_failure(app, job)
        assert (code, "was killed by signal 9" in message) == ("PROCESS_DIED", True)


async def test_a_child_that_died_while_idle_does_not_fail_the_next_job(app: Holdfast) -> None:
    async with working(app):
        child = ProcessId.of((await (await tasks.pid.submit("a")).result(60))[0])
        os.kill(child.pid, signal.SIGKILL)
        await eventually(lambda: not child.is_running())
        job = await tasks.pid.submit("b")
        await job.result(60)
        assert (await job.info()).attempt == 1


async def test_errors_in_a_child_are_classified_there(app: Holdfast) -> None:
    async with working(app):
        state, code, message = await wait_failure(app, await tasks.refuse.submit())
        assert (state, code, message) == (State.FAILED, "TASK_FATAL", "not like this")


async def test_a_task_that_a_child_cannot_import_is_refused_at_startup(app: Holdfast, url: str) -> None:
    hidden = Holdfast(url)

    @hidden.task(process=True)
    def inside() -> None: ...

    with pytest.raises(InvalidOption, match="at the module's top level"):
        await Worker(hidden).run()


def test_tasks_of_a_script_run_in_children_too(tmp_path: Path, url: str) -> None:
    """The module is `__main__`: a child loads its file, but does not run its main block."""
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
                print("child" if await job.result(60) != os.getpid() else "parent")
                worker.drain()
                await running

        if __name__ == "__main__":
            asyncio.run(main())
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=50, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("child\n", "")


def test_a_child_ends_with_a_worker_that_has_unread_data() -> None:
    """The connection is then reset instead of closed."""
    worker_end, child_end = socket.socketpair()
    with worker_end, child_end:
        code = f"from holdfast.execution.child_processes import main; main({child_end.fileno()})"
        child = subprocess.Popen([sys.executable, "-c", code], pass_fds=[child_end.fileno()])
        child_end.send(b"unread")
        child_end.close()
        worker_end.close()
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
        asyncio.run(_wait_written(note))
        # The worker still runs, and so does its child.
        child = ProcessId.of(int(note.read_text()))
    finally:
        worker.kill()
        worker.wait()
    asyncio.run(_wait_ended(child))


async def _wait_child(note: Path) -> ProcessId:
    """Wait for the note. Return the process that has written it."""
    return ProcessId.parse(await eventually(lambda: note.exists() and note.read_text(), "the child to start"))


async def _wait_written(note: Path) -> None:
    await eventually(lambda: note.exists() and note.read_text(), "the child to start")


async def _wait_ended(child: ProcessId) -> None:
    await eventually(lambda: not child.is_running(), "the child to end")
