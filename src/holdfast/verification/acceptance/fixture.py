"""Fixture and results of the acceptance criteria.

`AcceptanceFixture` gives criteria an app in the run's sandbox, a worker, worker processes to kill or pause, and the
events of a job. `Criterion`, `CriterionResult` and `AcceptanceReport` describe the checks and their results.
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
from holdfast.execution.backend import backend_of
from holdfast.operations.operations import Operations
from holdfast.upkeep.upkeep import Upkeep
from holdfast.verification.acceptance.sandbox import BACKLOG, FENCE, MAIN, Sandbox
from holdfast.verification.acceptance.worker_process import ExternalSystem, build
from holdfast.worker.worker import Worker


class CriterionStatus(StrEnum):
    """Result of one criterion."""

    PASSED = "passed"
    FAILED = "failed"
    #: The deployment lacks what it tests, for example a ledger.
    NOT_APPLICABLE = "not applicable"


class Criterion(msgspec.Struct, frozen=True):
    """One requirement. `check` returns what it found, or raises `CriterionFailed` or `NotApplicable`."""

    id: str
    title: str
    #: What the check does.
    done: str
    check: Callable[[AcceptanceFixture], Awaitable[str]]


class CriterionResult(msgspec.Struct, frozen=True, kw_only=True):
    """Status and details of one criterion."""

    id: str
    title: str
    done: str
    verdict: CriterionStatus
    #: What was found, why it failed, or why it does not apply.
    seen: str
    seconds: float


class AcceptanceReport(msgspec.Struct, kw_only=True):
    """Results of all criteria."""

    namespace: str
    url: str
    ledger: str | None
    results: list[CriterionResult] = []
    seconds: float = 0.0
    #: Remarks for the operator, for example leftovers of a killed run.
    notes: list[str] = []

    @property
    def ok(self) -> bool:
        """Whether no criterion failed."""
        return not self.count(CriterionStatus.FAILED)

    def count(self, verdict: CriterionStatus) -> int:
        """Number of criteria with this verdict."""
        return sum(result.verdict is verdict for result in self.results)


class CriterionFailed(Exception):
    """The criterion does not hold; the message says what was found instead."""


class NotApplicable(Exception):
    """The criterion does not apply to this deployment; the message says why."""


def check(condition: object, seen: str) -> None:
    """Raise `CriterionFailed` unless the condition holds."""
    if not condition:
        raise CriterionFailed(seen)


def check_equal(what: str, found: Any, expected: Any) -> None:
    """Raise `CriterionFailed` unless both are equal."""
    if found != expected:
        raise CriterionFailed(f"{what}: {_plain(found)} instead of {_plain(expected)}")


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_plain, value)) + "]"
    return str(value) if isinstance(value, str) and value else repr(value)


T = TypeVar("T")

#: Longer than any step should take, far shorter than a run may.
TIMEOUT_S: Final = 15.0
#: How long a worker or upkeep may take to stop; what it still holds then is removed with the sandbox.
_STOP_S: Final = 5.0
#: Result of a reclaimed job.
RECLAIMED: Final = "the worker that reclaimed the job"

_PAUSE_S: Final = 0.02
_FEED_PAGE: Final = 100_000

OPERATOR: Final = Principal(name="verify-operator", role=Role.ADMIN, tenants=frozenset({ALL_TENANTS}))
APPROVER: Final = Principal(name="verify-approver", role=Role.APPROVER, tenants=frozenset({ALL_TENANTS}))


class AcceptanceFixture:
    """App, worker and upkeep in a sandbox, as an async context manager."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.outside = ExternalSystem()
        self.app = build(sandbox.settings, self._end_at_once, self.outside)
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
        """Operations for operators and approvers."""
        return Operations.for_app(self.app)

    @property
    def has_ledger(self) -> bool:
        return backend_of(self.app).ledger is not None

    def need_ledger(self) -> None:
        """Raise `NotApplicable` without a ledger."""
        if not self.has_ledger:
            raise NotApplicable(self.sandbox.no_ledger or "there is no ledger (HOLDFAST_LEDGER)")

    def need_redis(self) -> None:
        """Raise `NotApplicable` without Redis."""
        if self.sandbox.redis is None:
            raise NotApplicable("the engine is a SQLite file: no other program adds or removes its jobs")

    # Jobs ------------------------------------------------------------------------------------------

    async def submit(self, task: str, *, queue: str = MAIN, **arguments: Any) -> Job[Any]:
        """Submit one job."""
        return await self.app.tasks[task].options(queue=queue).submit(**arguments)

    async def events(self, job: Job[Any]) -> list[Event]:
        """Events of a job, oldest first: from the ledger, or from the feed if there is no ledger."""
        if self.has_ledger:
            await self.app.ledger.wait_caught_up(TIMEOUT_S)
            queries = self.app.ledger.queries
            row = await queries.job(job.id, queue=job.queue)
            events = [found.event() for found in await queries.events(row.key)]
        else:
            entries = await self.app.engine.read_feed(job.queue, "", _FEED_PAGE)
            events = [event for entry in entries for event in entry.events if event.job_id == job.id]
        ignored = (HEARTBEAT_EVENT, OPERATOR_PREFIX)
        return [event for event in events if not event.type.startswith(ignored)]

    async def types(self, job: Job[Any]) -> list[str]:
        """Types of a job's events, without the prefix `task.`."""
        return [event.type.removeprefix("task.") for event in await self.events(job)]

    async def until(self, find: Callable[[], Awaitable[T | None]], what: str) -> T:
        """Poll `find` until it returns something, and return that. Raises `CriterionFailed` after a timeout."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := await find()):
            if time.monotonic() > deadline:
                raise CriterionFailed(f"timed out after {TIMEOUT_S:g} s waiting for {what}")
            await asyncio.sleep(_PAUSE_S)
        return found

    async def nothing_pending(self, queue: str, *, of: str = "the job") -> None:
        """Raise `CriterionFailed` if a job of the queue is open, or a message is ready or pending."""
        stats = await self.app.engine.stats(queue)
        check_equal(f"open jobs after the end of {of}", {str(k): n for k, n in stats.states.items() if n}, {})
        check_equal(f"leases after the end of {of}", stats.pending, 0)
        if self.sandbox.redis is not None:
            check_equal("messages in the streams, and pending ones", await self.sandbox.redis.waiting(queue), (0, 0))

    # Workers ---------------------------------------------------------------------------------------

    @asynccontextmanager
    async def worker(self, queue: str) -> AsyncIterator[Worker]:
        """A worker in this process while the block runs."""
        worker = Worker(self.app, [queue], name="verify")
        running = asyncio.create_task(worker.run())
        try:
            await self._wait_ready(worker)
            yield worker
        finally:
            worker.drain()
            await _wait_stopped(running)

    async def _wait_ready(self, worker: Worker) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not worker.ready:
            if time.monotonic() > deadline:
                raise EngineUnavailable(f"a worker was not ready within {TIMEOUT_S:g} s")
            await asyncio.sleep(_PAUSE_S)

    @asynccontextmanager
    async def child(self, queue: str) -> AsyncIterator[WorkerProcess]:
        """A separate worker process while the block runs; killed at its end if it still runs."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "holdfast.verification.acceptance.worker_process", queue),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        child = WorkerProcess(process)
        try:
            await child.send(self.sandbox.settings.model_dump_json())
            check_equal("the worker process's first line", await child.line(), "ready")
            yield child
        finally:
            await child.kill()

    @asynccontextmanager
    async def _upkeep(self) -> AsyncIterator[None]:
        """Upkeep for the queues without a worker, so that their jobs reach the ledger. It reclaims nothing."""
        settings = self.sandbox.settings.model_copy(update={"reclaim": False})
        app = build(settings, self._end_at_once, self.outside)
        async with app:
            upkeep = Upkeep(app.engine, [FENCE, BACKLOG], settings, backend_of(app).ledger)
            running = asyncio.create_task(upkeep.run())
            try:
                yield
            finally:
                upkeep.stop()
                await _wait_stopped(running)

    async def _end_at_once(self, _job_id: str) -> str:
        return RECLAIMED


async def _wait_stopped(running: asyncio.Task[Any]) -> None:
    """Wait for a task to end, with a timeout in case a server does not answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_STOP_S):
            await running


class WorkerProcess:
    """A worker process that holds one job."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line(self) -> str:
        """The next line of its output. Raises `CriterionFailed` if there is none in time."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                output = await self._process.stdout.readline()
        except TimeoutError:
            raise CriterionFailed(f"the worker process printed nothing for {TIMEOUT_S:g} s") from None
        if not output:
            raise CriterionFailed(f"the worker process ended by itself: {await self._last_error()}")
        return output.decode().strip()

    async def begun(self, job: Job[Any]) -> None:
        """Wait until it has begun the job."""
        check_equal("the job that the worker process began", await self.line(), f"begun {job.id}")

    async def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        await self._process.stdin.drain()

    def pause(self) -> None:
        """SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    async def resume(self) -> dict[str, int]:
        """Send SIGCONT and let it end its job. Returns the counts of the engine's answers."""
        self._process.send_signal(signal.SIGCONT)
        await self.send("continue")
        line = await self.line()
        check(line.startswith("{"), f"the worker process printed {line!r} after its pause")
        counts: dict[str, int] = json.loads(line)
        return counts

    async def kill(self) -> None:
        """kill -9; safe to call twice."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _last_error(self) -> str:
        assert self._process.stderr is not None
        lines = (await self._process.stderr.read()).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {await self._process.wait()}"
