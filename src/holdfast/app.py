"""`Holdfast`: an app's tasks, its settings, and access to its stores.

The public side of an app. The internal side is a `Backend`, which other packages get with `backend_of(app)`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, Concatenate, Final, Literal, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

from holdfast.client.backend import Backend
from holdfast.client.configuration import Reconfigured
from holdfast.client.connections import LedgerClient
from holdfast.client.job import Job
from holdfast.client.options import SubmitOptions, parse_priority
from holdfast.client.task import Task
from holdfast.clock import Clock, SystemClock
from holdfast.core.job import DEFAULT_QUEUE, Priority
from holdfast.core.retry import Duration, Retry, duration_ms
from holdfast.core.text import check_name
from holdfast.core.verdict import OnExhausted
from holdfast.engine.port import Engine
from holdfast.errors import DuplicateTask, InvalidOption
from holdfast.execution.context import Context
from holdfast.execution.spec import TaskPolicy, TaskSpec
from holdfast.guard.registry import GuardRegistry
from holdfast.outbox.writer import Outbox
from holdfast.settings import Settings

P = ParamSpec("P")
R = TypeVar("R")

_log: Final = logging.getLogger("holdfast.tasks")

ExceptionTypes = type[BaseException] | tuple[type[BaseException], ...]


class TaskDecorator(Protocol):
    """The decorator that `@app.task(…)` returns.

    A first parameter of type `Context` is not an argument of the job.
    """

    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


class Holdfast:
    """An app: registers tasks, submits their jobs, and gives access to the engine and the ledger."""

    def __init__(
        self,
        url: str | None = None,
        *,
        ledger: str | None = None,
        settings: Settings | None = None,
        retry: Retry | None = None,
        clock: Clock | None = None,
        **overrides: Any,
    ) -> None:
        """Settings come from the arguments, `HOLDFAST_*` and `holdfast.toml`, or complete as `settings`.

        `retry` is the policy of tasks that do not set one; by default that of the settings. Raises `MissingExtra` for
        a store whose driver is not installed, and for tracing without its packages.
        """
        if settings is not None and (url is not None or ledger is not None or overrides):
            raise InvalidOption("give settings, or url and single settings, not both")
        if settings is None:
            given = {"url": url, "ledger": ledger, **overrides}
            given = {name: value for name, value in given.items() if value is not None}
            settings = Settings.exactly(given)
        else:
            given = settings.model_dump(exclude_unset=True)
        self._retry = None if retry is None else _checked_retry(retry)
        self._backend = backend = Backend(given, settings, clock or SystemClock())
        self._ledger = LedgerClient(lambda: backend.engine, lambda: backend.ledger)

    @property
    def settings(self) -> Settings:
        """The current settings."""
        return self._backend.settings

    @property
    def tasks(self) -> Mapping[str, Task[..., Any]]:
        """Registered tasks by name."""
        return MappingProxyType(self._backend.tasks)

    @property
    def guard(self) -> GuardRegistry:
        """Rules that review every job before it runs: `@app.guard`, `app.guard.rule(…)`."""
        return self._backend.guard

    # Stores ----------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine of the running event loop; opened by `open()` or the first submission."""
        return self._backend.engine

    @property
    def ledger(self) -> LedgerClient:
        """Queries of the ledger: `await app.ledger.queries.jobs(…)`, `await app.ledger.wait_caught_up()`."""
        return self._ledger

    @property
    def outbox(self) -> Outbox:
        """Events in your own transaction: `await app.outbox.add(connection, topic, key=…, payload=…)`."""
        return self._backend.outbox_writer

    async def open(self) -> None:
        """Connect to the stores; raises immediately if the engine is unreachable.

        Optional before a submission. An unreachable ledger is logged. Raises `SchemaMismatch` if the ledger's tables
        are those of another release.
        """
        await self._backend.open()

    async def close(self) -> None:
        """Close the connections of this event loop and those of blocking calls. The app can be used again."""
        await self._backend.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def configure(self, *, clock: Clock | None = None, **overrides: Any) -> Reconfigured[Self]:
        """Change settings or the clock while the app is not open; None unsets a setting.

        As a block (`with` or `async with`), it is undone at the end. A URL in memory isolates the app: stores,
        brokers and webhooks named before, in code or outside it, are dropped unless named in the same call.
        """
        return Reconfigured(self, self._backend.configure(overrides, clock))

    # Tasks -----------------------------------------------------------------------------------------

    @overload
    def task(self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[Concatenate[Context, P], R], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(
        self,
        /,
        *,
        name: str | None = None,
        queue: str = DEFAULT_QUEUE,
        retry: Retry | None = None,
        timeout: Duration | None = None,
        on_exhausted: OnExhausted | Literal["dead_letter", "suspend"] = OnExhausted.DEAD_LETTER,
        retry_on: ExceptionTypes = (),
        fatal_on: ExceptionTypes = (),
        unavailable_on: ExceptionTypes = (),
        process: bool = False,
        priority: Priority | str = Priority.NORMAL,
    ) -> TaskDecorator: ...

    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        queue: str = DEFAULT_QUEUE,
        retry: Retry | None = None,
        timeout: Duration | None = None,
        on_exhausted: OnExhausted | Literal["dead_letter", "suspend"] = OnExhausted.DEAD_LETTER,
        retry_on: ExceptionTypes = (),
        fatal_on: ExceptionTypes = (),
        unavailable_on: ExceptionTypes = (),
        process: bool = False,
        priority: Priority | str = Priority.NORMAL,
    ) -> Any:
        """Register a function, `async` or not. Used as `@app.task` or `@app.task(…)`.

        `name`: the task's name on the wire (default: the function's). `timeout`: a run that takes longer is ended and
        counts as a failure that is retried. `retry_on`: only these exceptions are retried; `fatal_on`: these are never
        retried; `unavailable_on`: these mean that a dependency is down, and use up no retries. `on_exhausted`: what
        happens to a job that failed for good. `process=True` runs it in a child process, which can be killed.
        """
        chosen = self._retry if retry is None else _checked_retry(retry)
        policy = TaskPolicy(
            retry=chosen or self.settings.retry,
            timeout_ms=_timeout_ms(timeout),
            on_exhausted=_on_exhausted(on_exhausted),
            retry_on=_exception_types(retry_on, "retry_on"),
            fatal_on=_exception_types(fatal_on, "fatal_on"),
            unavailable_on=_exception_types(unavailable_on, "unavailable_on"),
            process=process,
        )
        checked_priority = parse_priority(priority)
        if name is not None:
            check_name(name, "a task's name")

        def register(function: Callable[..., Any]) -> Task[..., Any]:
            checked_queue = check_name(queue, "queue")
            task = self._make_task(function, name, checked_queue, policy, checked_priority)
            self._backend.add_task(task, retry_from_settings=chosen is None)
            return task

        return register if function is None else register(function)

    def job(self, job_id: str, queue: str = DEFAULT_QUEUE) -> Job[Any]:
        """Return the handle of a job by its id; its result is decoded to plain values."""
        return Job(self._backend, job_id, queue, duplicate=False)

    async def submit_raw(self, task: str, payload: bytes, **options: Unpack[SubmitOptions]) -> Job[Any]:
        """Submit a job by task name, with an encoded payload.

        Name and payload are checked against the app's tasks. An app without tasks checks only that the payload is
        JSON.
        """
        backend = self._backend
        envelope = backend.envelope(task, payload, **options)
        if (connection := options.get("connection")) is not None:
            (receipt,) = await backend.enqueue_in_transaction(connection, [envelope])
            tenant_id = envelope.tenant_id
            return Job(backend, receipt.job_id, envelope.queue, receipt.duplicate, outbox_of=tenant_id)
        receipt = await (await backend.connections.submitter()).submit(envelope)
        return Job(backend, receipt.job_id, envelope.queue, receipt.duplicate)

    def _make_task(
        self, function: Callable[..., Any], name: str | None, queue: str, policy: TaskPolicy, priority: Priority
    ) -> Task[..., Any]:
        if not inspect.isroutine(function):
            raise InvalidOption(f"@app.task decorates a function, not {function!r}")
        if name is None and function.__name__ == "<lambda>":
            raise InvalidOption("a lambda has no name for its task; set one with app.task(name=…)")
        name = name or check_name(function.__name__, "a task's name")
        if name in self._backend.tasks:
            raise DuplicateTask(name)
        spec = TaskSpec(name, function, policy, self.settings.payload_limit)
        if spec.results.unchecked:
            _log.warning(
                "results of task %r are not checked: %s; annotate what it returns, `-> object` for anything",
                name,
                spec.results.unchecked,
            )
        return Task(self._backend, spec, queue, priority)


def _checked_retry(retry: Retry) -> Retry:
    if not isinstance(retry, Retry):
        raise InvalidOption(f"retry must be a Retry(…), not {retry!r}")
    return retry


def _timeout_ms(timeout: Duration | None) -> int | None:
    if timeout is None:
        return None
    timeout_ms = duration_ms(timeout, "timeout")
    if timeout_ms == 0:
        raise InvalidOption("timeout must be more than 0; leave it out for no limit")
    return timeout_ms


def _on_exhausted(value: OnExhausted | str) -> OnExhausted:
    try:
        return OnExhausted(value)
    except ValueError as exc:
        raise InvalidOption(f"on_exhausted must be dead_letter or suspend, not {value!r}") from exc


def _exception_types(given: object, what: str) -> tuple[type[BaseException], ...]:
    types = given if isinstance(given, tuple) else (given,)
    for item in types:
        if not (isinstance(item, type) and issubclass(item, BaseException)):
            raise InvalidOption(f"{what} takes an exception type or a tuple of them, not {item!r}")
    return types
