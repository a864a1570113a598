"""The jobs of a chaos run, and what each of them is meant to come to. All of it follows from the seed and the number.

Workers, upkeep and server load `app` from here; its stores come from `HOLDFAST_*`. What a job does to the outside world
is a line in a file: the one thing that cannot be taken back, and that must not be there twice.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from holdfast.app import Holdfast
from holdfast.core.job import DEFAULT_QUEUE, Priority
from holdfast.core.retry import Retry
from holdfast.core.states import State
from holdfast.errors import Fatal
from holdfast.execution.context import Context
from holdfast.guard.decisions import RequireApproval

SIDE_QUEUE: Final = "side"
TENANTS: Final = ("default", "north", "south")

_RETRY: Final = Retry(max_retries=3, base=0.05, cap=0.5, jitter=0.05)

app = Holdfast(retry=_RETRY)
app.guard.rule("asked for", task="asked", then=RequireApproval("a person wants to see it"))


@app.task
async def plain(number: int, pause_s: float = 0.0) -> int:
    """Over soon."""
    await asyncio.sleep(pause_s)
    return 2 * number


@app.task(queue=SIDE_QUEUE)
def threaded(number: int, pause_s: float) -> int:
    """In a thread."""
    time.sleep(pause_s)
    return number


@app.task
async def flaky(ctx: Context, failures: int) -> int:
    """Fails so many times, then succeeds."""
    if ctx.retry_count < failures:
        raise ConnectionError(f"failure {ctx.retry_count + 1} of {failures}")
    return ctx.retry_count


@app.task(retry=Retry(max_retries=1, base=0.05, jitter=0.05))
async def doomed(number: int, fatal: bool) -> None:
    """Never succeeds: a dead letter."""
    raise Fatal(f"{number} cannot be") if fatal else ValueError(f"{number} is always wrong")


@app.task
async def outside(ctx: Context, key: str, folder: str, pause_s: float) -> str:
    """Acts on the outside world, once."""
    return await ctx.effect(key, _write_outside, key, folder, pause_s)


@app.task(queue=SIDE_QUEUE)
def outside_threaded(ctx: Context, key: str, folder: str, pause_s: float) -> str:
    """The same in a thread."""
    return ctx.blocking.effect(key, _write_outside, key, folder, pause_s)


@app.task
async def stepped(ctx: Context, number: int, sleep_s: float) -> int:
    """Two checkpoints, and a sleep between them during which the job is given back."""
    first = await ctx.step("first", _add, number, 1)
    await ctx.sleep(sleep_s)
    return await ctx.step("second", _add, first, 1)


@app.task
async def asked(number: int) -> int:
    """Waits for people before it may run."""
    return number


@app.task
async def asking(ctx: Context, number: int) -> str:
    """Asks people in the middle of its run."""
    consent = await ctx.approval("go on", {"number": number})
    return ", ".join(consent.by)


@app.task
async def long(number: int, seconds: float) -> int:
    """Outlives its lease, which is renewed."""
    await asyncio.sleep(seconds)
    return number


def effects_file(folder: str | Path) -> Path:
    """The outside world."""
    return Path(folder) / "outside.txt"


def external_effects(folder: str | Path) -> list[str]:
    """What was done to it: a key for each time."""
    path = effects_file(folder)
    return path.read_text().split() if path.exists() else []


def _write_outside(key: str, folder: str, pause_s: float) -> str:
    time.sleep(pause_s)
    # One write of a short line with O_APPEND is whole, whoever else writes; on disk before anybody is told.
    file = os.open(effects_file(folder), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(file, f"{key}\n".encode())
        os.fsync(file)
    finally:
        os.close(file)
    time.sleep(pause_s)
    return key


async def _add(number: int, more: int) -> int:
    return number + more


# What is submitted -----------------------------------------------------------------------------------------

_ENDED_WELL: Final = frozenset({State.SUCCEEDED})
_FAILED: Final = frozenset({State.FAILED})
_CANCELLED: Final = frozenset({State.CANCELLED})

#: Kinds of jobs and how many of a hundred are of each.
_MIX: Final = {
    "plain": 27,
    "flaky": 12,
    "doomed": 4,
    "outside": 9,
    "outside_threaded": 5,
    "stepped": 7,
    "delayed": 8,
    "cancelled": 5,
    "asked": 4,
    "asking": 2,
    "threaded": 14,
    "long": 3,
}
_KINDS: Final = tuple(_MIX)
_WEIGHTS: Final = tuple(_MIX.values())


class WorkItem(msgspec.Struct, frozen=True, kw_only=True):
    """One job as it is to be submitted, and what may become of it."""

    number: int
    kind: str
    task: str
    arguments: dict[str, Any]
    key: str
    queue: str
    tenant_id: str
    priority: Priority
    delay_s: float
    #: How it is handed in: "http", "single" or "bulk".
    way: str
    durable: bool
    #: Submitted a second time although it was accepted; there must be one job all the same.
    twice: bool
    #: What people do with it: "", "approve", "reject", "cancel".
    decision: str
    #: Ends that are right.
    may_end: frozenset[State]


def work_item(seed: int, number: int, folder: str | Path) -> WorkItem:
    """The `number`-th job of a run: always the same one."""
    # A generator of its own, so that a job does not depend on how many were made before it.
    random = Random(f"{seed}:{number}")
    (kind,) = random.choices(_KINDS, _WEIGHTS)
    key = f"chaos-{seed}-{number}"
    # Long enough that faults find some half-way.
    pause_s = round(random.uniform(0, 0.3), 3)
    task, delay_s, decision, may_end = kind, 0.0, "", _ENDED_WELL
    arguments: dict[str, Any] = {"number": number}
    more: dict[str, Any] = {}
    match kind:
        case "flaky":
            arguments = {"failures": random.randint(1, 3)}
        case "doomed":
            more, may_end = {"fatal": random.random() < 0.5}, _FAILED
        case "outside" | "outside_threaded":
            arguments = {"key": key, "folder": str(folder), "pause_s": pause_s}
        case "stepped":
            more = {"sleep_s": round(random.uniform(0, 0.5), 3)}
        case "delayed":
            task, delay_s = "plain", round(random.uniform(0.05, 3), 3)
        case "cancelled":
            # Some wait, some run; which of the two comes first, the end or the cancellation, is open.
            decision, may_end = "cancel", _ENDED_WELL | _CANCELLED
            if random.random() < 0.5:
                task, delay_s = "plain", round(random.uniform(0.5, 5), 3)
            else:
                task, more = "long", {"seconds": round(random.uniform(0.5, 3), 3)}
        case "asked" | "asking":
            decision = "reject" if random.random() < 0.3 else "approve"
            may_end = _CANCELLED if decision == "reject" else _ENDED_WELL
        case "plain" | "threaded":
            more = {"pause_s": pause_s}
        case "long":
            more = {"seconds": round(random.uniform(1, 5), 3)}
    return WorkItem(
        number=number,
        kind=kind,
        task=task,
        arguments={**arguments, **more},
        key=key,
        queue=SIDE_QUEUE if task in ("threaded", "outside_threaded") else DEFAULT_QUEUE,
        tenant_id=random.choices(TENANTS, (6, 3, 1))[0],
        priority=random.choices(list(Priority), (2, 6, 2))[0],
        delay_s=delay_s,
        way=random.choices(("http", "single", "bulk"), (3, 3, 4))[0],
        durable=random.random() < 0.1,
        twice=random.random() < 0.1,
        decision=decision,
        may_end=may_end,
    )


def probe(seed: int, number: int) -> WorkItem:
    """The job that shows that work goes on after the `number`-th fault. Its number is below all others."""
    return WorkItem(
        number=-1 - number,
        kind="probe",
        task="plain",
        arguments={"number": number},
        key=f"chaos-{seed}-probe-{number}",
        queue=DEFAULT_QUEUE,
        tenant_id=TENANTS[0],
        priority=Priority.NORMAL,
        delay_s=0.0,
        way="single",
        durable=False,
        twice=False,
        decision="",
        may_end=_ENDED_WELL,
    )
