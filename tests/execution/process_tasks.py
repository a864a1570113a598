"""Tasks that run in child processes. They are at the top level, because a child imports this module again."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast import Context, Fatal, Holdfast, Retry
from tests.processes import ProcessId

app = Holdfast("sqlite://")

NO_RETRY = Retry(max_retries=0)
AT_ONCE = Retry(max_retries=1, base=0, jitter=None)


def _write_note(note: str) -> None:
    """Write the id of this process, atomically: the test reads the file as soon as it exists."""
    draft = Path(f"{note}.draft")
    draft.write_text(str(ProcessId.of(os.getpid())))
    draft.rename(note)


@app.task(process=True)
def pid(ctx: Context, word: str) -> tuple[int, str, str]:
    return os.getpid(), word, ctx.job_id


@app.task(process=True)
async def nap(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return os.getpid()


@app.task(process=True)
def meet(folder: str, runs: int) -> int:
    """Return when the given number of runs is in this folder at the same time."""
    Path(folder, str(os.getpid())).touch()
    while len(os.listdir(folder)) < runs:
        time.sleep(0.01)
    return os.getpid()


@app.task(process=True, timeout=0.5, retry=NO_RETRY)
def hang(note: str) -> None:
    _write_note(note)
    while True:
        time.sleep(0.05)


@app.task(process=True, timeout=0.5, retry=NO_RETRY)
def hold_gil(note: str) -> None:
    """Block like native code that never releases the GIL: no other thread of the child runs."""
    _write_note(note)
    ctypes.PyDLL(None).sleep(60)


@app.task(process=True, retry=NO_RETRY)
def wait_for_end(note: str) -> None:
    _write_note(note)
    time.sleep(60)


@app.task(process=True, retry=AT_ONCE)
def die(code: int) -> None:
    os._exit(code)


@app.task(process=True)
def refuse() -> None:
    raise Fatal("not like this")


@app.task(process=True)
def big(size: int) -> str:
    return "x" * size


@app.task(process=True, retry=NO_RETRY)
def take_step(ctx: Context) -> int:
    return ctx.blocking.step("one", lambda: 1)


@app.task(process=True)
async def drop_approval(ctx: Context) -> None:
    list[object]().append(ctx.approval("ship it?"))


@app.task(process=True)
def wrong_result() -> int:
    return "no"  # type: ignore[return-value]


@dataclass
class Spot:
    x: int


@app.task(process=True)
async def place(x: int) -> Spot:
    return {"x": x}  # type: ignore[return-value]
