"""Fixture and results of the acceptance criteria.

`AcceptanceFixture` gives criteria an app in the run's sandbox, a worker, worker processes to kill or pause, and the
events of a job. `Criterion`, `CriterionResult` and `AcceptanceReport` describe what is checked and what came of it.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from enum import StrEnum
from typing import Any, Final, Self, TypeVar

import msgspec

from holdfast.client.job import Job
from holdfast.core.job import Event
from holdfast.core.principal import ALL_TENANTS, Principal, Role
from holdfast.core.states import HEARTBEAT_EVENT, OPERATOR_PREFIX
from holdfast.errors import EngineUnavailable
from holdfast.operations.operations import Operations
from holdfast.upkeep.upkeep import Upkeep
from holdfast.verification.acceptance.sandbox import BACKLOG, FENCE, MAIN, Sandbox
from holdfast.verification.acceptance.worker_process import ExternalSystem, build
from holdfast.worker.worker import Worker


class CriterionStatus(StrEnum):
    """On one criterion."""

    PASSED = "passed"
    FAILED = "failed"
    #: The deployment lacks what it is about (a ledger, say).
    NOT_APPLICABLE = "not applicable"


class Criterion(msgspec.Struct, frozen=True):
    """One thing that must hold. `check` returns what it saw, or raises `Unmet` or `NotApplicable`."""

    id: str
    title: str
    #: What is done to find out.
    done: str
    check: Callable[[AcceptanceFixture], Awaitable[str]]


class CriterionResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one criterion."""

    id: str
    title: str
    done: str
    verdict: CriterionStatus
    #: What was seen; why it failed; why it does not apply.
    seen: str
    seconds: float


class AcceptanceReport(msgspec.Struct, kw_only=True):
    """What came of all of them."""

    namespace: str
    url: str
    ledger: str | None
    results: list[CriterionResult] = []
    seconds: float = 0.0
    #: What else a person should know: remains of a run that was killed, say.
    notes: list[str] = []

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.count(CriterionStatus.FAILED)

    def count(self, verdict: CriterionStatus) -> int:
        """How many criteria have this verdict."""
        return sum(result.verdict is verdict for result in self.results)


class CriterionFailed(Exception):
    """The criterion does not hold; the message says what was seen instead."""


class NotApplicable(Exception):
    """There is nothing here that the criterion could be about; the message says why."""


def check(condition: object, seen: str) -> None:
    """Raise `Unmet` unless the condition holds."""
    if not condition:
        raise CriterionFailed(seen)


def check_equal(what: str, found: Any, wanted: Any) -> None:
    """Raise `Unmet` unless both are equal."""
    if found != wanted:
        raise CriterionFailed(f"{what}: {_plain(found)} instead of {_plain(wanted)}")


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_plain, value)) + "]"
    return str(value) if isinstance(value, str) and value else repr(value)


T = TypeVar("T")

#: Longer than anything here should take, far shorter than a run may.
PATIENCE_S: Final = 15.0
#: How long a worker or upkeep may take to leave; what it still holds then is removed with the room.
_LEAVE_S: Final = 5.0
TAKEN_OVER: Final = "the worker that took over"

_PAUSE_S: Final = 0.02
_FEED_PAGE: Final = 100_000

OPERATOR: Final = Principal(name="verify-operator", role=Role.ADMIN, tenants=frozenset({ALL_TENANTS}))
APPROVER: Final = Principal(name="verify-approver", role=Role.APPROVER, tenants=frozenset({ALL_TENANTS}))


class AcceptanceFixture:
    """Open it, run criteria on it, close it."""

    def __init__(self, room: Sandbox) -> None:
        self.room = room
        self.outside = ExternalSystem()
        self.app = build(room.settings, self._take_over, self.outside)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._stack.enter_async_context(self.app)
            await self._stack.enter_async_context(self.worker(MAIN))
            await self._stack.enter_async_context(self._upkeep())
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def operations(self) -> Operations:
        """Where operators and approvers work."""
        return Operations.for_app(self.app)

    @property
    def has_ledger(self) -> bool:
        return self.app.ledger_backend is not None

    def need_ledger(self) -> None:
        """Raise `NotApplicable` without one."""
        if not self.has_ledger:
            raise NotApplicable(self.room.no_ledger or "there is no ledger (HOLDFAST_LEDGER)")

    def need_redis(self) -> None:
        """Raise `NotApplicable` without one."""
        if self.room.redis is None:
            raise NotApplicable("the engine is a SQLite file: no other program writes to it, or takes jobs out of it")

    # Jobs ------------------------------------------------------------------------------------------

    async def submit(self, task: str, *, queue: str = MAIN, **arguments: Any) -> Job[Any]:
        """One job."""
        return await self.app.tasks[task].options(queue=queue).submit(**arguments)

    async def events(self, job: Job[Any]) -> list[Event]:
        """What happened to a job, oldest first: as the ledger has it, without one as the feed tells it."""
        if self.has_ledger:
            await self.app.ledger.wait_caught_up(PATIENCE_S)
            queries = self.app.ledger.queries
            row = await queries.job(job.id, queue=job.queue)
            told = [line.event() for line in await queries.events(row.key)]
        else:
            entries = await self.app.engine.read_feed(job.queue, "", _FEED_PAGE)
            told = [event for entry in entries for event in entry.events if event.job_id == job.id]
        beside = (HEARTBEAT_EVENT, OPERATOR_PREFIX)
        return [event for event in told if not event.type.startswith(beside)]

    async def types(self, job: Job[Any]) -> list[str]:
        """The same, the events' types alone."""
        return [event.type.removeprefix("task.") for event in await self.events(job)]

    async def until(self, look: Callable[[], Awaitable[T | None]], what: str) -> T:
        """What `look` finds, once it finds something. Raises `Unmet`."""
        give_up_at = time.monotonic() + PATIENCE_S
        while not (found := await look()):
            if time.monotonic() > give_up_at:
                raise CriterionFailed(f"waited {PATIENCE_S:g} s in vain for {what}")
            await asyncio.sleep(_PAUSE_S)
        return found

    async def nothing_pending(self, queue: str, *, of: str = "the job") -> None:
        """Raise `Unmet` if a job of the queue is open, or a message is in line or unacknowledged."""
        stats = await self.app.engine.stats(queue)
        check_equal(f"open jobs after the end of {of}", {str(k): n for k, n in stats.states.items() if n}, {})
        check_equal(f"leases after the end of {of}", stats.pending, 0)
        if self.room.redis is not None:
            check_equal("messages in line, and pending ones", await self.room.redis.waiting(queue), (0, 0))

    # Workers ---------------------------------------------------------------------------------------

    @asynccontextmanager
    async def worker(self, queue: str) -> AsyncIterator[Worker]:
        """A worker in this process while the block runs."""
        worker = Worker(self.app, [queue], name="verify")
        running = asyncio.create_task(worker.run())
        try:
            await self._is_ready(worker)
            yield worker
        finally:
            worker.drain()
            await _left(running)

    async def _is_ready(self, worker: Worker) -> None:
        give_up_at = time.monotonic() + PATIENCE_S
        while not worker.ready:
            if time.monotonic() > give_up_at:
                raise EngineUnavailable(f"a worker was not ready within {PATIENCE_S:g} s")
            await asyncio.sleep(_PAUSE_S)

    @asynccontextmanager
    async def child(self, queue: str) -> AsyncIterator[WorkerProcess]:
        """A worker process of its own while the block runs; killed at its end, if it still lives."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "holdfast.verification.acceptance.worker_process", queue),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        child = WorkerProcess(process)
        try:
            await child.send(self.room.settings.model_dump_json())
            check_equal("the worker process's first word", await child.line(), "ready")
            yield child
        finally:
            await child.kill()

    @asynccontextmanager
    async def _upkeep(self) -> AsyncIterator[None]:
        """Keeps the queues that no worker serves, so that the ledger learns of their jobs; takes nothing over."""
        settings = self.room.settings.model_copy(update={"reclaim": False})
        app = build(settings, self._take_over, self.outside)
        async with app:
            upkeep = Upkeep(app.engine, [FENCE, BACKLOG], settings, app.ledger_backend)
            running = asyncio.create_task(upkeep.run())
            try:
                yield
            finally:
                upkeep.stop()
                await _left(running)

    async def _take_over(self, _job_id: str) -> str:
        return TAKEN_OVER


async def _left(running: asyncio.Task[Any]) -> None:
    """Wait until it has ended; soon, even if a server is silent."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LEAVE_S):
            await running


class WorkerProcess:
    """A worker process that does nothing but hold a job."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line(self) -> str:
        """The next thing that it says. Raises `Unmet` if it says nothing."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(PATIENCE_S):
                said = await self._process.stdout.readline()
        except TimeoutError:
            raise CriterionFailed(f"the worker process said nothing for {PATIENCE_S:g} s") from None
        if not said:
            raise CriterionFailed(f"the worker process ended by itself: {await self._last_words()}")
        return said.decode().strip()

    async def begun(self, job: Job[Any]) -> None:
        """Wait until it holds the job."""
        check_equal("the job that the worker process began", await self.line(), f"begun {job.id}")

    async def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        await self._process.stdin.drain()

    def pause(self) -> None:
        """SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    async def resume(self) -> dict[str, int]:
        """SIGCONT, and let it end its job; what the engine made of that."""
        self._process.send_signal(signal.SIGCONT)
        await self.send("go on")
        said = await self.line()
        check(said.startswith("{"), f"the worker process said {said!r} after its pause")
        counts: dict[str, int] = json.loads(said)
        return counts

    async def kill(self) -> None:
        """kill -9; safe to call twice."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _last_words(self) -> str:
        assert self._process.stderr is not None
        said = (await self._process.stderr.read()).decode(errors="replace").strip().splitlines()
        return said[-1] if said else f"exit code {await self._process.wait()}"
