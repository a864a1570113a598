"""Running the program as a shell would, and waiting for what it does."""

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

#: Python, imports and a slow machine; what the tests wait for themselves has its own deadline.
PATIENCE_S: Final = 60
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
async def refuse(why: str) -> None:
    raise Fatal(why)


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
    """A working directory with a sample app in it, and a database of its own."""

    folder: Path
    environment: dict[str, str]

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "holdfast", *words]

    def run(self, *words: str, code: int | None = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run to the end; the exit code must be as told."""
        variables = self.environment | environment
        done = forked.run(self.command(*words), cwd=self.folder, env=variables, timeout=PATIENCE_S)
        if code is not None:
            assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *words: str, code: int | None = 0) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.run(*words, "--json", code=code).stdout)

    def view(self, job_id: str, queue: str = "default") -> JobInfo:
        """The job as the engine has it: quicker than the program, for waiting."""

        async def look() -> JobInfo | None:
            engine = build_engine(Settings.load(url=self.environment["HOLDFAST_URL"]))
            await engine.open()
            try:
                return (await engine.get(queue, [job_id]))[0]
            finally:
                await engine.close()

        view = asyncio.run(look())
        assert view is not None, f"the engine does not know job {job_id}"
        return view

    def wait_state(self, job_id: str, wanted: State) -> JobInfo:
        """Wait until the job is in this state."""

        def look() -> JobInfo | None:
            view = self.view(job_id)
            return view if view.state is wanted else None

        view = eventually(look, what=f"job {job_id} to be {wanted}")
        assert view is not None
        return view

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
        """Wait until it has logged this; it must not have ended by then."""

        def look() -> bool:
            if not self.logged(text) and self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode}:\n{self.log.read_text()}")
            return self.logged(text)

        eventually(look, what=f"{text!r} in the log")

    def end(self) -> int:
        """SIGTERM, and its exit code."""
        self.process.terminate()
        return self.process.wait(PATIENCE_S)


def eventually(look: Callable[[], T], *, what: str = "a condition", within_s: float = PATIENCE_S) -> T:
    """What `look` returns once that is true."""
    give_up_at = time.monotonic() + within_s
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() > give_up_at:
            raise AssertionError(f"waited {within_s:g} s for {what}")
        time.sleep(0.05)


def environment(folder: Path, **more: str) -> dict[str, str]:
    """This environment, without any setting of holdfast's, and with the sources on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    path = os.pathsep.join(filter(None, [str(SOURCE), kept.get("PYTHONPATH", "")]))
    return kept | {"PYTHONPATH": path, "HOLDFAST_URL": f"sqlite:///{folder}/jobs.db", "COLUMNS": "200"} | more
