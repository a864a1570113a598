"""The steps of the demo: submissions, live progress, a killed worker, operators, the final check.

Two principals take part: one approves a large refund, and discarding a dead letter needs both.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn
from rich.text import Text

from holdfast import Job, State
from holdfast.core.job import JobInfo
from holdfast.core.states import FINAL
from holdfast.demo import orders
from holdfast.demo.check import Expected, check, summary
from holdfast.demo.sandbox import Workers, read_holdfast, run_holdfast
from holdfast.observe.terminal import SafeConsole, progress_bars

if TYPE_CHECKING:
    from rich.progress import Progress  # noqa: TID251 - only its type

console: Final = SafeConsole()


class DemoUser:
    """A principal that runs commands with its own token."""

    def __init__(self, name: str, token: str) -> None:
        self.name = name
        self._token = token

    @classmethod
    async def hire(cls, name: str) -> DemoUser:
        """Create the token as the local user."""
        return cls(name, await read_holdfast("token", "create", name, "--role", "admin", "--all-tenants"))

    async def types(self, *words: str, fails: bool = False) -> None:
        """Print and run a command; end the demo unless it succeeds, or with `fails` unless it fails."""
        console.print()
        console.print(Text.assemble((f"{self.name} $", "bold"), f" holdfast {_format_command(words)}"), soft_wrap=True)
        code = await run_holdfast(*words, HOLDFAST_TOKEN=self._token)
        if (code != 0) is not fails:
            raise SystemExit(f"holdfast {words[0]} ended with {code}")


async def approve_a_refund(ada: DemoUser) -> Job[str]:
    """Submit a large refund, which waits for an approval without occupying a worker, and approve it."""
    job = await orders.refund.submit(7, cents=25_000)
    state = ((await job.info()).state.value, "bold")
    console.print(Text.assemble("\na refund of 250.00 is ", state, ": a guard of the app requires an approval"))
    await ada.types("approvals", "list")
    (waiting,) = json.loads(await read_holdfast("approvals", "list", "--json"))
    await ada.types("approvals", "approve", waiting["approval_id"], "--reason", "the customer is right")
    return job


async def discard_a_dead_letter(ada: DemoUser, ben: DemoUser) -> None:
    """Discard a dead letter: one principal requests it, another confirms; the requester cannot confirm."""
    dead_letters: list[dict[str, Any]] = json.loads(await read_holdfast("dlq", "list", "--task", "ship", "--json"))
    dlq_id = dead_letters[0]["dlq_id"]
    await ada.types("dlq", "discard", dlq_id, "--reason", "there is no Atlantis")
    await ada.types("dlq", "confirm", dlq_id, fails=True)
    await ben.types("dlq", "confirm", dlq_id)
    await ben.types("log", "--limit", "4")


def _format_command(words: tuple[str, ...]) -> str:
    return " ".join(f"'{word}'" if " " in word else word for word in words)


#: Generous for slow machines, but a stuck demo must end.
DEADLINE_S: Final = 120
POLL_INTERVAL_S: Final = 0.1
DELAY_S: Final = 3
QUEUES: Final = ("default", "reports")
T = TypeVar("T")


async def play(folder: Path) -> int:
    """Run the whole demo. Returns its exit code."""
    async with orders.app as app:
        for queue in QUEUES:
            # With a reader attached the feed keeps every event, for the check at the end.
            await app.engine.attach_reader(queue)
        with Workers(folder) as workers:
            expected = await submit_orders()
            console.print(f"submitted {len(expected)} jobs to {app.settings.url}; starting two workers")
            for name in ("red", "blue"):
                workers.start(f"demo-{name}")
            await all_finished(workers, expected)
            report = await kill_in_the_middle(workers)
            # Meanwhile the lease expires, and the other worker reclaims the job.
            expected += await run_operator_steps(workers)
            await all_finished(workers, [report])
            expected.append(report)
        results = await check(app.engine, QUEUES, expected)
    console.print(summary(results))
    await show("the job whose worker was killed", "jobs", "show", report.job_id)
    await show("the same in sentences", "explain", report.job_id)
    await show("verification: every history in the ledger is gapless and legal", "verify", "--ledger")
    problems = [problem for result in results for problem in result.problems] + workers.ended_badly
    for problem in problems:
        console.print(Text.assemble(("wrong:", "bold red"), f" {problem}"))
    if not problems:
        console.print("\nevery job ended as expected", style="bold green")
    return 1 if problems else 0


async def show(what: str, *words: str) -> None:
    """Print and run a command; end the demo if it fails."""
    console.print(Text.assemble(f"\n{what}: ", (f"holdfast {' '.join(words)}", "bold"), "\n"), soft_wrap=True)
    if await run_holdfast(*words) != 0:
        raise SystemExit(f"holdfast {words[0]} failed")


async def submit_orders() -> list[Expected]:
    """Submit all groups but the long report. Returns the expected outcomes."""
    confirmed = await orders.confirm.submit_many(
        [(orders.Order(number, f"customer {number}", [995, number]),) for number in range(250)]
    )
    expected = group("succeed at once", confirmed)
    for hiccups, often in enumerate(("once", "twice", "three times"), start=1):
        charged = await orders.charge.submit_many([(number, 995, hiccups) for number in range(20)])
        expected += group(f"fail {often}, then succeed", charged, attempts=hiccups + 1, retries=hiccups)
    exhausted = await orders.charge.submit(7, 995, hiccups=99)
    expected += group("run out of retries", [exhausted], State.FAILED, attempts=4, retries=3)
    expected += group("fatal: no retry", [await orders.ship.submit(8, "Atlantis")], State.FAILED)
    expected += group("same key submitted twice", [await submit_twice()])
    later = await orders.remind.options(delay=DELAY_S).submit(9)
    due_at_ms = (await later.info()).created_at_ms + DELAY_S * 1000
    expected += group(f"delayed by {DELAY_S} s", [later], not_before_ms=due_at_ms)
    withdrawn = await orders.remind.options(delay=3600).submit(10)
    await withdrawn.cancel(reason="the customer withdrew")
    return expected + group("cancelled before it ran", [withdrawn], State.CANCELLED, attempts=0)


async def submit_twice() -> Job[str]:
    """Submit twice with one key; the second submission must return the first job."""
    once = orders.ship.options(idempotency_key="order-11")
    first, second = await once.submit(11, "NO"), await once.submit(11, "NO")
    if (second.id, first.duplicate, second.duplicate) != (first.id, False, True):
        raise SystemExit("the second submission with the same key was not recognised as a duplicate")
    return first


async def kill_in_the_middle(workers: Workers) -> Expected:
    """Submit a long job and kill the worker that runs it; the other worker must finish it."""
    job = await orders.report.submit("May", pages=40)
    running = await wait_until(workers, job.info, lambda view: view.state is State.RUNNING, "the report runs")
    name = workers.kill(running.worker)
    lease_s = orders.app.settings.visibility_timeout_s
    killed = f" {name}, during the report; its lease expires after {lease_s:g} s"
    console.print(Text.assemble(("kill -9", "bold red"), killed))
    (only,) = group("worker killed with -9", [job], attempts=2)
    return only


async def run_operator_steps(workers: Workers) -> list[Expected]:
    """Run the steps that need operators: an approval, and a discard by two principals."""
    ada, ben = await asyncio.gather(DemoUser.hire("ada"), DemoUser.hire("ben"))
    refund = group("approved by an operator", [await approve_a_refund(ada)])
    await all_finished(workers, refund)
    await discard_a_dead_letter(ada, ben)
    return refund


def group(name: str, jobs: Iterable[Job[Any]], state: State = State.SUCCEEDED, **more: int) -> list[Expected]:
    """Expect the same outcome of all these jobs."""
    return [Expected(name, job.id, job.queue, state, **more) for job in jobs]


async def all_finished(workers: Workers, expected: list[Expected]) -> None:
    """Show the progress of each group until every job has ended."""
    with progress() as bars:
        sizes = Counter(job.group for job in expected)
        bar = {name: bars.add_task(name, total=size) for name, size in sizes.items()}

        async def read() -> int:
            ended = Counter(job.group for job, view in await views(expected) if view and view.state in FINAL)
            for name, task in bar.items():
                bars.update(task, completed=ended[name])
            return ended.total()

        await wait_until(workers, read, lambda ended: ended == len(expected), "all jobs have ended")


async def views(expected: list[Expected]) -> list[tuple[Expected, JobInfo | None]]:
    """Read the current state of each job."""
    pairs: list[tuple[Expected, JobInfo | None]] = []
    for queue in QUEUES:
        jobs = [job for job in expected if job.queue == queue]
        pairs += zip(jobs, await orders.app.engine.get(queue, [job.job_id for job in jobs]), strict=True)
    return pairs


async def wait_until(workers: Workers, read: Callable[[], Awaitable[T]], good: Callable[[T], bool], what: str) -> T:
    """Poll `read` until `good` accepts its value. The demo fails on a timeout or if a worker ends."""
    deadline = time.monotonic() + DEADLINE_S
    while not good(value := await read()):
        workers.check()
        if time.monotonic() > deadline:
            raise SystemExit(f"timed out after {DEADLINE_S} s: waited until {what}")
        await asyncio.sleep(POLL_INTERVAL_S)
    return value


def progress() -> Progress:
    return progress_bars(console, "{task.description:<28}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
