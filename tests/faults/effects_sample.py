"""The app of the fault tests of effects: each act appends a line to the file named by `FAULTS_ACTS`."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Final

from holdfast import Context, Holdfast, Retry

ACTS_VARIABLE: Final = "FAULTS_ACTS"
QUICK: Final = Retry(max_retries=3, base=0.05, cap=0.2, jitter=None)

app = Holdfast(retry=QUICK)


async def act(note: str) -> str:
    with Path(os.environ[ACTS_VARIABLE]).open("a") as acts:  # noqa: ASYNC230 - one line
        acts.write(f"{note} {os.getpid()}\n")
    return f"did {note}"


async def act_and_kill_worker(note: str) -> str:
    await act(note)
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


async def act_and_wait(note: str, gate: str) -> str:
    done = await act(note)
    while not Path(gate).exists():  # noqa: ASYNC110, ASYNC240 - the gate is opened by another process
        await asyncio.sleep(0.005)
    return done


def act_and_wait_in_a_thread(note: str, gate: str) -> str:
    """Cannot be stopped, even after its run has ended."""
    with Path(os.environ[ACTS_VARIABLE]).open("a") as acts:
        acts.write(f"{note} {os.getpid()}\n")
    while not Path(gate).exists():
        time.sleep(0.005)
    return f"did {note}"


@app.task
async def crash(ctx: Context) -> str:
    return await ctx.effect("crash", act_and_kill_worker, "crash")


@app.task
async def crash_again(ctx: Context) -> str:
    """The first worker is killed; the one that reclaims the job acts again."""
    function = act_and_kill_worker if ctx.attempt == 1 else act
    function.__qualname__ = "act"
    return await ctx.effect.options(in_doubt="run_again")("again", function, "again")


@app.task
async def wait(ctx: Context, key: str, gate: str) -> str:
    return await ctx.effect(key, act_and_wait, key, gate)


@app.task
async def wait_in_a_thread(ctx: Context, key: str, gate: str) -> str:
    return await ctx.effect(key, act_and_wait_in_a_thread, key, gate)


@app.task
async def steps(ctx: Context) -> str:
    first = await ctx.step("first", act, "first")
    if ctx.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return f"{first}, {await ctx.step('second', act, 'second')}"
