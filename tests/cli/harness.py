"""Run the program as a shell does, and wait for its results."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import holdfast
from holdfast import Settings, State
from holdfast.core.job import JobInfo
from holdfast.factory import build_engine
from tests import forked

T = TypeVar("T")

#: Enough for Python, imports and a slow machine.
TIMEOUT_S: Final = 60
SOURCE: Final = Path(holdfast.__file__).resolve().parent.parent
EXAMPLES: Final = SOURCE.parent / "examples"

SAMPLE_APP: Final = """
import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from holdfast import Context, Fatal, Holdfast, Retry

app = Holdfast()


@app.task
async def add(a: int, b: int = 1) -> int:
    return a + b


@app.task
async def refuse(reason: str) -> None:
    raise Fatal(reason)


@app.task(retry=Retry(max_retries=1, base=0.05, jitter=None))
def flaky(ctx: Context) -> str:
    if ctx.retry_count == 0:
        raise ValueError("not yet")
    return "now"


@app.task
async def slow(ctx: Context, seconds: float) -> str:
    Path(f"{ctx.job_id}.begun").touch()
    await asyncio.sleep(seconds)
    return "done"


@app.task(queue="other")
async def elsewhere() -> str:
    return "from the other queue"
"""


@dataclass(frozen=True)
class Shell:
    """A working directory with a sample app and its own database."""

    folder: Path
    environment: dict[str, str]

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "holdfast", *words]

    def run(self, *words: str, code: int | None = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run to the end, and check the exit code."""
        variables = self.environment | environment
        done = forked.run(self.command(*words), cwd=self.folder, env=variables, timeout=TIMEOUT_S)
        if code is not None:
            assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *words: str, code: int | None = 0) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.run(*words, "--json", code=code).stdout)

    def info(self, job_id: str, queue: str = "default") -> JobInfo:
        """Read the job from the engine, which is quicker than the program."""

        async def read() -> JobInfo | None:
            engine = build_engine(Settings.load(url=self.environment["HOLDFAST_URL"]))
            await engine.open()
            try:
                return (await engine.get(queue, [job_id]))[0]
            finally:
                await engine.close()

        info = asyncio.run(read())
        assert info is not None, f"the engine does not know job {job_id}"
        return info

    def wait_state(self, job_id: str, expected: State) -> JobInfo:
        """Wait until the job is in this state."""

        def check() -> JobInfo | None:
            info = self.info(job_id)
            return info if info.state is expected else None

        info = eventually(check, what=f"job {job_id} to be {expected}")
        assert info is not None
        return info

    def wait_begun(self, job_id: str) -> None:
        """Wait until the code of `slow` runs. A job that is only claimed is released when its worker is drained."""
        eventually((self.folder / f"{job_id}.begun").exists, what=f"job {job_id} to begin")

    @contextmanager
    def start(self, *words: str, **environment: str) -> Iterator[Process]:
        """Run in the background; killed when the block is left, if it still runs."""
        log = self.folder / f"{words[0]}-{time.monotonic_ns()}.log"
        with log.open("wb") as errors:
            process = forked.start(
                self.command(*words),
                cwd=self.folder,
                env=self.environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
        try:
            yield Process(process, log)
        finally:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Process:
    """A background command and its stderr."""

    process: subprocess.Popen[bytes]
    log: Path

    def logged(self, text: str) -> bool:
        return text in self.log.read_text(errors="replace")

    def wait_log(self, text: str) -> None:
        """Wait until the process has logged this; it must not have ended by then."""

        def check() -> bool:
            if not self.logged(text) and self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode}:\n{self.log.read_text()}")
            return self.logged(text)

        eventually(check, what=f"{text!r} in the log")

    def end(self) -> int:
        """Send SIGTERM, and return the exit code."""
        self.process.terminate()
        return self.process.wait(TIMEOUT_S)


def eventually(check: Callable[[], T], *, what: str = "a condition", within_s: float = TIMEOUT_S) -> T:
    """Wait until `check` returns a true value, and return it."""
    deadline = time.monotonic() + within_s
    while True:
        result = check()
        if result:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {within_s:g} s for {what}")
        time.sleep(0.05)


def environment(folder: Path, **more: str) -> dict[str, str]:
    """This environment without holdfast settings, and with the sources on the path."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    path = os.pathsep.join(filter(None, [str(SOURCE), inherited.get("PYTHONPATH", "")]))
    return inherited | {"PYTHONPATH": path, "HOLDFAST_URL": f"sqlite:///{folder}/jobs.db", "COLUMNS": "200"} | more
