"""Processes that are forked after the app was created: pre-forking servers, multiprocessing, a bare `os.fork`.

All of them fork from a separate process: the test process has threads and must not be forked.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from holdfast import Holdfast, Job
from tests.processes import ProcessId
from tests.worker.support import TIMEOUT_S, eventually

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

_ROOT = Path(__file__).resolve().parent.parent.parent
#: Longer than a process takes to start on a busy machine.
_SCRIPT_S = 45
_CONCURRENCY = 4
_JOBS = 2 * _CONCURRENCY


class Forking:
    """`forking_app` in separate processes."""

    def __init__(self, folder: Path, url: str, namespace: str) -> None:
        self._folder = folder
        self._environment = os.environ | {
            "FORKING_FOLDER": str(folder),
            "HOLDFAST_URL": url,
            "HOLDFAST_NAMESPACE": namespace,
            "HOLDFAST_CONCURRENCY": str(_CONCURRENCY),
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", *arguments], cwd=_ROOT, env=self._environment, start_new_session=True
        )

    def stop(self) -> None:
        if self.process is not None:
            # Kills the whole session, with the processes that it has forked.
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def begun(self) -> list[int]:
        """Return the pid of each run, in any order."""
        files = [self._folder / f"begun-{number}" for number in range(_JOBS)]
        return [int(line) for file in files if file.exists() for line in file.read_text().split()]

    def finish(self, process: int) -> None:
        """Let the jobs of this process finish."""
        (self._folder / f"go-{process}").touch()


@pytest.fixture
def forking(tmp_path: Path, engine_url: str, namespace: str) -> Iterator[Forking]:
    forking = Forking(tmp_path, engine_url, namespace)
    yield forking
    forking.stop()


@pytest.fixture
async def jobs(engine_url: str, namespace: str) -> AsyncIterator[list[Job[int]]]:
    async with Holdfast(engine_url, namespace=namespace) as app:
        yield [await app.submit_raw("wait", b'{"number":%d}' % number) for number in range(_JOBS)]


async def end_one_then_the_other(forking: Forking, jobs: list[Job[int]]) -> None:
    """Send SIGTERM to one of two working processes: it drains, and the jobs of the other continue."""
    await eventually(lambda: len(forking.begun()) == _JOBS, "all jobs to run")
    first, second = sorted(set(forking.begun()))
    ending = ProcessId.of(first)
    os.kill(first, signal.SIGTERM)
    forking.finish(first)
    await eventually(lambda: not ending.is_running(), "the first process to end")
    forking.finish(second)
    results = [await job.result(TIMEOUT_S) for job in jobs]
    assert results == list(range(_JOBS))
    runs = forking.begun()
    assert len(runs) == _JOBS, "jobs of the other process were released and ran again"


async def test_forked_workers_have_separate_identities(forking: Forking, jobs: list[Job[int]]) -> None:
    forking.start("tests.worker.forking_app")
    await end_one_then_the_other(forking, jobs)


async def test_gunicorn_with_preload_ends_one_process_without_releasing_jobs_of_others(
    forking: Forking, jobs: list[Job[int]]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    kind = ("--worker-class", "uvicorn.workers.UvicornWorker", "--workers", "2")
    forking.start(
        "gunicorn", "--preload", "--no-control-socket", *kind, "--bind", address, "tests.worker.forking_app:api"
    )
    await end_one_then_the_other(forking, jobs)


def run(script: str, *arguments: str) -> str:
    """Return the output of a script. Fails if the script fails or hangs."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), *arguments],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=_SCRIPT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


_APP = """
import asyncio, os, signal, sys
from holdfast import Holdfast
from holdfast.execution.backend import backend_of

app = Holdfast(sys.argv[1], namespace=sys.argv[2])

@app.task
async def work() -> None: ...

def wait_child(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("statement", ["await work.submit()", "sys.exit(3)"])
def test_a_fork_inside_a_running_loop_is_a_clear_error_and_does_not_affect_the_parent(
    engine_url: str, namespace: str, statement: str
) -> None:
    script = f"""
    async def main():
        async with app:
            await work.submit()
            child = os.fork()
            if not child:
                {statement}
                return
            status = await asyncio.to_thread(wait_child, child)
            # The child has closed its event loop; a result from another thread must still wake this one.
            job = await work.submit()
            print("parent", status, await job.state())

    asyncio.run(main())
    """
    output = run(_APP + textwrap.dedent(script), engine_url, namespace)
    failed = statement.startswith("await")
    assert f"parent {1 if failed else 3} queued" in output
    assert ("this process was forked inside a running event loop" in output) == failed
    if failed:
        assert "no running event loop\n" not in output.rpartition("Traceback")[2]


def test_a_forked_process_can_run_its_own_loop(engine_url: str, namespace: str) -> None:
    """multiprocessing does this when it is called inside a running loop."""
    script = """
    async def submit():
        async with app:
            await work.submit()

    async def main():
        async with app:
            await work.submit()
            parent_engine = app.engine
            child = os.fork()
            if not child:
                replaced = app.engine is not parent_engine
                asyncio.run(submit())
                os._exit(0 if replaced else 1)
            print("child", await asyncio.to_thread(wait_child, child))
            print((await app.engine.stats("default")).states)

    asyncio.run(main())
    """
    output = run(_APP + textwrap.dedent(script), engine_url, namespace)
    assert "child 0" in output
    assert "<State.QUEUED: 'queued'>: 2" in output


def test_a_lock_held_by_another_thread_at_the_fork_does_not_block_the_child(engine_url: str, namespace: str) -> None:
    script = """
    import threading
    held, forked = threading.Barrier(2), threading.Event()

    def hold():
        with backend_of(app).connections._lock, backend_of(app).portal._lock:
            held.wait()
            forked.wait()

    work.submit_sync()
    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(10)
        work.submit_sync()
        os._exit(0)
    forked.set()
    holder.join()
    print("child", wait_child(child))
    """
    assert "child 0" in run(_APP + textwrap.dedent(script), engine_url, namespace)


def test_a_temporary_database_stays_when_a_forked_process_ends() -> None:
    script = """
    work.submit_sync()
    child = os.fork()
    if not child:
        sys.exit()
    print("child", wait_child(child))
    work.submit_sync()

    async def count():
        async with app:
            print((await app.engine.stats("default")).states)

    asyncio.run(count())
    """
    output = run(_APP + textwrap.dedent(script), "sqlite://", "here")
    assert "child 0" in output
    assert "<State.QUEUED: 'queued'>: 2" in output


def test_a_signal_to_a_forked_process_does_not_reach_its_parent(engine_url: str, namespace: str) -> None:
    """A task that forks, for example a process pool, and ends its child by a signal does not drain its worker."""
    script = """
    def fork():
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        return wait_child(child)

    async def main():
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, print, "the parent got a signal")
        async with app:
            await work.submit()
            print("child", await asyncio.to_thread(fork))
            await work.submit()

    asyncio.run(main())
    """
    output = run(_APP + textwrap.dedent(script), engine_url, namespace)
    assert "child 0" in output
    assert "got a signal" not in output
