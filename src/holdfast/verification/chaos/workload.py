"""The jobs of a chaos run and their expected ends. Each follows from the seed and its number alone.

Jobs of the load have numbers from 0, probes and the jobs of `crash` faults have negative ones.

Workers, upkeep and server load `app` from here; `HOLDFAST_*` variables name its stores. The external effect of a job is
a line in a file, which cannot be undone and must not be written twice. A job that ends its process first adds a line
to another file.
"""

from __future__ import annotations

import asyncio
import os
import signal
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

_CRASHES: Final = "crashes.jsonl"

_RETRY: Final = Retry(max_retries=3, base=0.05, cap=0.5, jitter=0.05)

app = Holdfast(retry=_RETRY)
app.guard.rule("asked for", task="asked", then=RequireApproval("every such job needs an approval"))


@app.task
async def plain(number: int, pause_s: float = 0.0) -> int:
    """Ends after a short pause."""
    await asyncio.sleep(pause_s)
    return 2 * number


@app.task(queue=SIDE_QUEUE)
def threaded(number: int, pause_s: float) -> int:
    """Runs in a thread."""
    time.sleep(pause_s)
    return number


@app.task
async def flaky(ctx: Context, failures: int) -> int:
    """Fails `failures` times, then succeeds."""
    if ctx.retry_count < failures:
        raise ConnectionError(f"failure {ctx.retry_count + 1} of {failures}")
    return ctx.retry_count


@app.task(retry=Retry(max_retries=1, base=0.05, jitter=0.05))
async def doomed(number: int, fatal: bool) -> None:
    """Always fails: becomes a dead letter."""
    raise Fatal(f"{number} cannot be") if fatal else ValueError(f"{number} is always wrong")


@app.task
async def outside(ctx: Context, key: str, folder: str, pause_s: float) -> str:
    """Has an external effect, once."""
    return await ctx.effect(key, _write_outside, key, folder, pause_s)


@app.task(queue=SIDE_QUEUE)
def outside_threaded(ctx: Context, key: str, folder: str, pause_s: float) -> str:
    """Has an external effect, once, in a thread."""
    return ctx.blocking.effect(key, _write_outside, key, folder, pause_s)


@app.task
async def stepped(ctx: Context, number: int, sleep_s: float) -> int:
    """Two steps with a durable sleep between them, which releases the job."""
    first = await ctx.step("first", _add, number, 1)
    await ctx.sleep(sleep_s)
    return await ctx.step("second", _add, first, 1)


@app.task
async def asked(number: int) -> int:
    """Needs an approval before it runs."""
    return number


@app.task
async def asking(ctx: Context, number: int) -> str:
    """Requests an approval during its run."""
    approval = await ctx.approval("continue", {"number": number})
    return ", ".join(approval.by)


@app.task
async def long(number: int, seconds: float) -> int:
    """Runs longer than its lease, which is renewed."""
    await asyncio.sleep(seconds)
    return number


@app.task
async def crash(ctx: Context, how: str, folder: str, pause_s: float) -> None:
    """Ends its process."""
    await asyncio.sleep(pause_s)
    _end_process(ctx.job_id, how, folder)


@app.task(queue=SIDE_QUEUE)
def crash_threaded(ctx: Context, how: str, folder: str, pause_s: float) -> None:
    """Ends its process, from a thread."""
    time.sleep(pause_s)
    _end_process(ctx.job_id, how, folder)


#: Tasks that become poison pills, and no others.
PILLS: Final = frozenset({"crash", "crash_threaded"})


class Crash(msgspec.Struct, frozen=True):
    """A process that a job has ended."""

    job_id: str
    pid: int
    #: Wall clock time.
    at: float


def crashes(folder: str | Path) -> list[Crash]:
    """All processes that jobs have ended."""
    path = Path(folder) / _CRASHES
    return msgspec.json.Decoder(Crash).decode_lines(path.read_bytes()) if path.exists() else []


def _end_process(job_id: str, how: str, folder: str) -> None:
    _append(Path(folder) / _CRASHES, msgspec.json.encode(Crash(job_id, os.getpid(), time.time())) + b"\n")
    match how:
        case "abort":
            os.abort()
        case "exit":
            os._exit(3)
        case _:
            os.kill(os.getpid(), signal.SIGKILL)


def effects_file(folder: str | Path) -> Path:
    """The file that records external effects."""
    return Path(folder) / "outside.txt"


def external_effects(folder: str | Path) -> list[str]:
    """Keys of the effects that happened. An effect that happened twice has its key twice."""
    path = effects_file(folder)
    return path.read_text().split() if path.exists() else []


def _write_outside(key: str, folder: str, pause_s: float) -> str:
    time.sleep(pause_s)
    _append(effects_file(folder), f"{key}\n".encode())
    time.sleep(pause_s)
    return key


def _append(path: Path, line: bytes) -> None:
    # One short write with O_APPEND is atomic among concurrent writers; synced before it is reported.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(file, line)
        os.fsync(file)
    finally:
        os.close(file)


async def _add(number: int, more: int) -> int:
    return number + more


# Submissions -----------------------------------------------------------------------------------------------

_ENDED_WELL: Final = frozenset({State.SUCCEEDED})
_FAILED: Final = frozenset({State.FAILED})
_CANCELLED: Final = frozenset({State.CANCELLED})

#: Kinds of jobs and their shares in percent.
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
    """One job to submit, and its permitted ends."""

    number: int
    kind: str
    task: str
    arguments: dict[str, Any]
    key: str
    queue: str
    tenant_id: str
    priority: Priority
    delay_s: float
    #: How it is submitted: "http", "single" or "bulk".
    way: str
    durable: bool
    #: Whether it is submitted again after it was accepted; there must still be one job.
    twice: bool
    #: What an operator does with it: "", "approve", "reject", "cancel".
    decision: str
    #: Permitted final states.
    may_end: frozenset[State]


def work_item(seed: int, number: int, folder: str | Path) -> WorkItem:
    """The `number`-th job of a run; the same for the same seed."""
    # A separate generator, so that a job does not depend on the jobs made before it.
    random = Random(f"{seed}:{number}")
    (kind,) = random.choices(_KINDS, _WEIGHTS)
    key = f"chaos-{seed}-{number}"
    # Long enough that faults interrupt some of them.
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
            # Some are delayed, some run; either the end or the cancellation may come first.
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
    """The job that measures recovery after the `number`-th fault. Its own number is negative."""
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


#: Jobs of one `crash` fault: one ends its process, the others run at the same time.
CRASH_JOBS: Final = 9
_HOW: Final = ("abort", "exit", "kill")
#: The numbers from here down belong to crashes, those above to probes.
_CRASHES_FROM: Final = -1_000_000
_NUMBERS_OF_A_CRASH: Final = 100
#: Never replayed: each replay would end more processes.
_PILL: Final = 5


def crash_items(seed: int, number: int, folder: str | Path) -> list[WorkItem]:
    """The jobs of the `number`-th fault, if that is a `crash`: one that ends its worker, among others that do not."""
    random = Random(f"{seed}:crash:{number}")
    threaded, how = random.random() < 0.5, random.choice(_HOW)
    items = []
    for index in range(CRASH_JOBS):
        is_pill = index == _PILL
        pause_s = round(random.uniform(0.1, 0.3) if is_pill else random.uniform(0.2, 1.0), 3)
        task = ("crash" if is_pill else "plain", "crash_threaded" if is_pill else "threaded")[threaded]
        first: dict[str, Any] = {"how": how, "folder": str(folder)} if is_pill else {"number": index}
        items.append(
            WorkItem(
                number=_CRASHES_FROM - _NUMBERS_OF_A_CRASH * number - index,
                kind="pill" if is_pill else "neighbour",
                task=task,
                arguments={**first, "pause_s": pause_s},
                key=f"chaos-{seed}-crash-{number}-{index}",
                queue=SIDE_QUEUE if threaded else DEFAULT_QUEUE,
                tenant_id=TENANTS[0],
                priority=Priority.NORMAL,
                delay_s=0.0,
                way="bulk",
                durable=False,
                twice=False,
                decision="",
                may_end=_FAILED if is_pill else _ENDED_WELL,
            )
        )
    return items


def item_of(seed: int, number: int, folder: str | Path) -> WorkItem:
    """The work item of this number: of the load, a probe, or of a `crash` fault."""
    if number >= 0:
        return work_item(seed, number, folder)
    if number > _CRASHES_FROM:
        return probe(seed, -1 - number)
    fault, index = divmod(_CRASHES_FROM - number, _NUMBERS_OF_A_CRASH)
    return crash_items(seed, fault, folder)[index]
