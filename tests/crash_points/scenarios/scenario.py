"""What a story is, and the steps that many have."""

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
from tests.crash_points.process import Process, again
from tests.crash_points.stores import Place

QUEUE: Final = "default"


class World:
    """What is outside of all processes: what callers were told, and what has happened to others."""

    def __init__(self) -> None:
        #: Jobs that somebody was told are accepted, by the caller's key.
        self.accepted: dict[str, str] = {}
        #: How often each effect has happened.
        self.acted: Counter[str] = Counter()
        #: Whatever else a story has to remember.
        self.notes: dict[str, Any] = {}
        #: How many steps are done.
        self.step = 0

    def accept(self, key: str, job_id: str) -> None:
        """Somebody was told so; and the same key is always the same job."""
        assert self.accepted.setdefault(key, job_id) == job_id, f"key {key} was given two jobs"

    def act(self, key: str) -> str:
        """Something that cannot be taken back."""
        self.acted[key] += 1
        return f"did {key}"


Step = Callable[[Process, World], Awaitable[None]]


class Story:
    """Tasks, steps, and what must hold at the end beside what holds for all stories."""

    name: str
    settings: ClassVar[dict[str, Any]] = {}
    forks = False
    #: Whether something in it waits for something else: how often it looks meanwhile depends on the machine, so that
    #: the last of these looks may not be reached.
    waits = False
    #: Whether the ledger forgets jobs that have ended.
    forgets = False
    #: Whether workers lose leases in it, even if no process dies.
    loses_leases = False
    #: What may happen more than once: tasks are at least once, only effects are once.
    repeated: frozenset[str] = frozenset()

    def suits(self, place: Place) -> bool:
        return place.has_ledger

    def tasks(self, app: Holdfast, world: World) -> None:
        """Register them."""

    def plans(self, app: Holdfast, world: World) -> Mapping[str, TaskSpec]:
        """Of tasks that are not the app's."""
        return {}

    def steps(self) -> Sequence[Step]:
        """In order."""
        raise NotImplementedError

    async def attend(self, process: Process, world: World) -> None:
        """What people still do while everything comes to its end."""

    async def check(self, process: Process, world: World) -> None:
        """Raise `AssertionError`."""


async def hand_in(process: Process, world: World, task: str, key: str, **options: Any) -> None:
    """As a caller does who wants it done: again, with the same key, until told that it is accepted."""
    submit = process.app.tasks[task].options(idempotency_key=key, **options).submit
    job: Job[Any] = await again(submit)
    world.accept(key, job.id)


async def work(process: Process, world: World) -> None:
    await process.work()


async def keep(process: Process, world: World) -> None:
    await process.keep()


async def later(process: Process, world: World) -> None:
    """Longer than a lease and any retry."""
    await process.place.advance(31_000)


async def watch(process: Process, world: World) -> None:
    """A look at the backlog, as is taken every two seconds."""
    alarm = BacklogMonitor(
        process.engine, QueueSelection(process.engine, [QUEUE]), process.app.settings, process.ledger
    )
    await again(alarm.check)


async def check_alerts(process: Process, world: World) -> None:
    """None stands when everything has ended."""
    await watch(process, world)
    async with process.ledger.queries.snapshot() as snapshot:
        assert not await snapshot.scalar(select(func.count()).select_from(alerts)), "an alert stands"


async def view_of(process: Process, world: World, key: str) -> JobInfo:
    (view,) = await again(lambda: process.engine.get(QUEUE, [world.accepted[key]]))
    assert view is not None, f"the accepted job {key} is not there"
    found: JobInfo = view
    return found


async def state_of(process: Process, world: World, key: str) -> State:
    return (await view_of(process, world, key)).state
