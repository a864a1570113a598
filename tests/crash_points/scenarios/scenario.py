"""The base class of scenarios, and the steps that several scenarios share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

from sqlalchemy import func, select

from holdfast import Holdfast, Job
from holdfast.core.job import JobInfo
from holdfast.core.states import State
from holdfast.execution.spec import TaskSpec
from holdfast.schema import alerts
from holdfast.upkeep.backlog_monitor import BacklogMonitor
from holdfast.upkeep.loop import QueueSelection
from tests.crash_points.process import Process, retry_call
from tests.crash_points.stores import Stores

QUEUE: Final = "default"


class RunRecord:
    """State of a run outside of all processes: confirmed submissions, effects, and the steps done."""

    def __init__(self) -> None:
        #: Jobs whose acceptance was confirmed to a caller, by the caller's key.
        self.accepted: dict[str, str] = {}
        #: How often each effect has happened.
        self.effects: Counter[str] = Counter()
        #: Other state of a scenario.
        self.notes: dict[str, Any] = {}
        #: How many steps are done.
        self.step = 0

    def accept(self, key: str, job_id: str) -> None:
        """Record a confirmed submission. The same key must always be the same job."""
        assert self.accepted.setdefault(key, job_id) == job_id, f"key {key} has two jobs"

    def perform(self, key: str) -> str:
        """Perform an effect."""
        self.effects[key] += 1
        return f"did {key}"


Step = Callable[[Process, RunRecord], Awaitable[None]]


class Scenario:
    """Tasks, steps, and what must hold at the end besides what holds for all scenarios."""

    name: str
    settings: ClassVar[dict[str, Any]] = {}
    forks = False
    #: Whether a step waits by polling. The number of polls depends on the machine, so the last polls may not be
    #: reached.
    waits = False
    #: Whether the ledger prunes jobs that have ended.
    prunes = False
    #: Whether workers lose leases in it even if no process crashes.
    loses_leases = False
    #: What may happen more than once: tasks run at least once, only effects are once.
    repeated: frozenset[str] = frozenset()

    def supports(self, stores: Stores) -> bool:
        return stores.has_ledger

    def tasks(self, app: Holdfast, record: RunRecord) -> None:
        """Register the tasks."""

    def specs(self, app: Holdfast, record: RunRecord) -> Mapping[str, TaskSpec]:
        """Specs of tasks that are not the app's."""
        return {}

    def steps(self) -> Sequence[Step]:
        """All steps, in order."""
        raise NotImplementedError

    async def act_as_operator(self, process: Process, record: RunRecord) -> None:
        """What operators still do while all jobs are driven to their end."""

    async def check(self, process: Process, record: RunRecord) -> None:
        """Raise `AssertionError` if the scenario's own requirements do not hold."""


async def submit_until_accepted(process: Process, record: RunRecord, task: str, key: str, **options: Any) -> None:
    """Submit as a caller does: repeat with the same key until acceptance is confirmed."""
    submit = process.app.tasks[task].options(idempotency_key=key, **options).submit
    job: Job[Any] = await retry_call(submit)
    record.accept(key, job.id)


async def work(process: Process, record: RunRecord) -> None:
    await process.work()


async def run_upkeep(process: Process, record: RunRecord) -> None:
    await process.run_upkeep()


async def expire_leases(process: Process, record: RunRecord) -> None:
    """Advance time by more than a lease and any retry."""
    await process.stores.advance(31_000)


async def check_backlog(process: Process, record: RunRecord) -> None:
    """Check the backlog, as upkeep does every two seconds."""
    monitor = BacklogMonitor(
        process.engine, QueueSelection(process.engine, [QUEUE]), process.app.settings, process.ledger
    )
    await retry_call(monitor.check)


async def check_alerts(process: Process, record: RunRecord) -> None:
    """Check that no alert is raised when all jobs have ended."""
    await check_backlog(process, record)
    async with process.ledger.queries.snapshot() as snapshot:
        assert not await snapshot.scalar(select(func.count()).select_from(alerts)), "an alert is still raised"


async def get_info(process: Process, record: RunRecord, key: str) -> JobInfo:
    (info,) = await retry_call(lambda: process.engine.get(QUEUE, [record.accepted[key]]))
    assert info is not None, f"the accepted job {key} is not there"
    found: JobInfo = info
    return found


async def get_state(process: Process, record: RunRecord, key: str) -> State:
    return (await get_info(process, record, key)).state
