"""The app: a registry of tasks and the way in to the engine. The only place that builds adapters."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

from holdfast.client.configuration import Configurable
from holdfast.client.connections import LedgerClient, LoopConnections
from holdfast.client.job import Job
from holdfast.client.options import SubmitOptions, make_options, parse_priority
from holdfast.client.submitter import BatchingSubmitter, Submitter, TracedSubmitter
from holdfast.client.task import Task
from holdfast.clock import Clock, SystemClock
from holdfast.core.codec import decode_json
from holdfast.core.job import DEFAULT_QUEUE, Envelope, Priority, Receipt, new_job_ids
from holdfast.core.retry import Duration, Retry, duration_ms
from holdfast.core.text import check_name
from holdfast.core.verdict import OnExhausted
from holdfast.engine.port import Engine
from holdfast.errors import DuplicateTask, InvalidOption, InvalidPayload, NoLedger, PayloadTooLarge, UnknownTask
from holdfast.execution.context import Context
from holdfast.execution.spec import TaskPolicy, TaskSpec
from holdfast.guard.registry import GuardRegistry
from holdfast.guard.runner import GuardRunner
from holdfast.ledger.port.messages import OutboxEvent
from holdfast.observe.redact import add_redaction_rules
from holdfast.observe.tracing import tracer_for
from holdfast.outbox.drivers import insert_events, insert_events_sync
from holdfast.outbox.writer import Outbox, job_event_row
from holdfast.settings import Settings
from holdfast.webhooks.deliveries import WebhookPolicy

if TYPE_CHECKING:
    from holdfast.factory import OutboxHandle
    from holdfast.ledger.port.ledger import Ledger


P = ParamSpec("P")
R = TypeVar("R")

ExceptionTypes = type[BaseException] | tuple[type[BaseException], ...]


class TaskDecorator(Protocol):
    """What `@app.task(…)` with arguments gives: a decorator. A first parameter of type `Context` is not submitted."""

    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


class Holdfast(Configurable):
    """Tasks, and where their jobs go."""

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
        """Settings come from the arguments, `HOLDFAST_*` and `holdfast.toml`, or ready-made as `settings`.

        `retry` is the policy of tasks that name none of their own; without it the settings have one. Raises
        `MissingExtra` for a store whose driver is not installed, and for tracing without its packages.
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
        #: Tasks whose policy for retries is the settings'.
        self._by_settings: set[str] = set()
        self._tasks: dict[str, Task[..., Any]] = {}
        self._plans: dict[str, TaskSpec] = {}
        #: Sees every job before it may run: `@app.guard`, `app.guard.rule(…)`.
        self.guard = GuardRegistry(lambda: self.settings.guard_timeout_s)
        self._outbox: Outbox | None = None
        super().__init__(given, settings, clock or SystemClock())
        self._ledger_door = LedgerClient(lambda: self.engine, lambda: self._connections.ledger())

    @property
    def tasks(self) -> Mapping[str, Task[..., Any]]:
        """Registered tasks by name."""
        return MappingProxyType(self._tasks)

    @property
    def specs(self) -> Mapping[str, TaskSpec]:
        """How to run them, for workers."""
        return self._plans

    # Life ------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine of the running event loop; opened by `open()` or the first submission."""
        return self._connections.engine()

    @property
    def ledger(self) -> LedgerClient:
        """What remembers: `await app.ledger.caught_up()`, `await app.ledger.queries.jobs(…)`."""
        return self._ledger_door

    @property
    def outbox(self) -> Outbox:
        """Events in a transaction of your own: `await app.outbox.add(connection, topic, key=…, payload=…)`."""
        if self._outbox is None:
            self._outbox = Outbox(self.settings)
        return self._outbox

    @property
    def outbox_backend(self) -> OutboxHandle | None:
        """The relay's end of the outbox, for relays and tools; None if there is neither a ledger nor `outbox_url`."""
        return self._connections.outbox()

    @property
    def ledger_backend(self) -> Ledger | None:
        """The ledger of the running event loop, for workers and tools; None if there is none."""
        return self._connections.ledger()

    async def open(self) -> None:
        """Connect. Not needed before submitting, but tells at once whether the store is there.

        A ledger that does not answer is only warned of; one with tables of another release is a `SchemaMismatch`.
        """
        await self._connections.open()

    def require_ledger(self) -> None:
        """Raise `LedgerRefused` if the ledger refused user, password or database when this app was opened.

        For programs that should not start then; one that did not answer is none of these.
        """
        if (refusal := self._connections.ledger_refusal()) is not None:
            raise refusal

    async def close(self) -> None:
        """Give connections of this event loop, and of the blocking door, back. The app can be used again."""
        if self._portal.is_open:
            await asyncio.to_thread(self._portal.close, self._connections.close)
        await self._connections.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

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

        `name` fixes its name on the wire (default: the function's). `timeout` ends a run that takes longer,
        as a failure that retries. `retry_on`: only these exceptions retry; `fatal_on`: these never do;
        `unavailable_on`: these mean that a dependency is down, and use up no retries. `on_exhausted`: where
        a job goes that failed for good. `process=True` runs it in a child process, which can be killed.
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
            task = self._register(function, name, check_name(queue, "queue"), policy, checked_priority)
            if chosen is None:
                self._by_settings.add(task.name)
            return task

        return register if function is None else register(function)

    def job(self, job_id: str, queue: str = DEFAULT_QUEUE) -> Job[Any]:
        """A handle on a job by its id; its result comes as plain values."""
        return Job(self, job_id, queue, duplicate=False)

    async def submit_raw(self, task: str, payload: bytes, **options: Unpack[SubmitOptions]) -> Job[Any]:
        """Submit by name, with the payload as it goes on the wire.

        Checked against the task if this app has tasks; an app without any only passes on, and the worker
        will judge.
        """
        envelope = self.envelope(task, payload, **options)
        if (connection := options.get("connection")) is not None:
            (enlisted,) = await self.enqueue_in_transaction(connection, [envelope])
            tenant = envelope.tenant_id
            return Job(self, enlisted.job_id, envelope.queue, enlisted.duplicate, outbox_of=tenant)
        receipt = await (await self.submitter()).submit(envelope)
        return Job(self, receipt.job_id, envelope.queue, receipt.duplicate)

    def envelope(self, task: str, payload: bytes, **options: Unpack[SubmitOptions]) -> Envelope:
        """What `submit_raw` hands in, checked; under an id of its own every time."""
        if not isinstance(payload, bytes):
            raise InvalidPayload(
                f"the payload of submit_raw is JSON as bytes, not a {type(payload).__name__}; use "
                "json.dumps(…).encode(), or the task's own submit(…), which takes arguments"
            )
        known = self._tasks.get(task)
        if known is None and self._tasks:
            raise UnknownTask(task, tuple(self._tasks))
        limit = self.settings.payload_limit
        if len(payload) > limit:
            raise PayloadTooLarge(f"the payload of task {task!r}", len(payload), limit)
        if known is None:
            decode_json(payload, f"the payload of task {check_name(task, 'task')!r}")
        else:
            known.plan.decode(payload)
        queue, priority = (DEFAULT_QUEUE, Priority.NORMAL) if known is None else (known.queue, known.priority)
        chosen = make_options(options, queue=queue, priority=priority, payload_limit=limit)
        return chosen.envelope(new_job_ids(1)[0], task, payload)

    async def submitter(self) -> Submitter:
        """Where jobs are handed in, on this event loop."""
        return self._inline_submitter or await self._connections.submitter()

    # In a transaction of the user's --------------------------------------------------------------------

    async def enqueue_in_transaction(self, connection: Any, envelopes: Sequence[Envelope]) -> list[Receipt]:
        """Make jobs part of the transaction that is open on this connection; a relay hands them in after the commit.

        Inline mode runs them at once.
        """
        if self._inline_submitter is not None:
            return await self._inline_submitter.submit_many(envelopes)
        if not envelopes:
            return []
        with self._traced(envelopes) as traced:
            admitted = await self._connections.prepare(traced)
            await insert_events(connection, [job_event_row(envelope) for envelope in admitted])
        return [Receipt(envelope.job_id) for envelope in admitted]

    def enqueue_in_transaction_sync(self, connection: Any, envelopes: Sequence[Envelope]) -> list[Receipt]:
        """`enlist` on a connection that blocks, which stays in this thread; guards are asked behind the door."""
        desk = self._inline_submitter
        if desk is not None:
            return self._portal.call("submit_sync", lambda: desk.submit_many(envelopes), "await task.submit(…)")
        with self._traced(envelopes) as traced:
            admitted = self._portal.call(
                "submit_sync", lambda: self._connections.prepare(traced), "await task.submit(…)"
            )
            insert_events_sync(connection, [job_event_row(envelope) for envelope in admitted])
        return [Receipt(envelope.job_id) for envelope in admitted]

    async def transactional_event(self, tenant_id: str, job_id: str) -> OutboxEvent | None:
        """The event of a job that was enlisted, as far as this app can see it. Inline mode has none."""
        if self._inline_submitter is not None:
            return None
        outbox = self._connections.outbox()
        if outbox is None:
            raise NoLedger("to know what became of a job that was submitted in a transaction")
        return await (await outbox.open()).get(tenant_id, job_id)

    @contextmanager
    def _traced(self, envelopes: Sequence[Envelope]) -> Iterator[Sequence[Envelope]]:
        tracer = tracer_for(self.settings.tracing)
        if tracer is None:
            yield envelopes
        else:
            with tracer.submit_span(envelopes) as (traced, _):
                yield traced

    def _settings_changed(self) -> None:
        self._outbox = None
        add_redaction_rules(self.settings.redact)
        for plan in self._plans.values():
            plan.payload_limit = self.settings.payload_limit
        for name in self._by_settings:
            plan = self._plans[name]
            plan.policy = replace(plan.policy, retry=self.settings.retry)

    def _make_connections(self, settings: Settings) -> LoopConnections:
        return LoopConnections(
            self._build_engine,
            self._build_ledger,
            settings.durable_timeout_s,
            self.guard_runner,
            lambda ledger: WebhookPolicy(self.settings, ledger),
            self._wrap_submitter,
            self._build_outbox,
            temporary=settings.isolated,
        )

    def _wrap_submitter(self, submitter: BatchingSubmitter) -> Submitter:
        """Submissions are traced if that is wanted; if not, there is nothing between."""
        tracer = tracer_for(self.settings.tracing)
        return submitter if tracer is None else TracedSubmitter(submitter, tracer)

    def guard_runner(self, ledger: Ledger | None, *, can_request_approval: bool | None = None) -> GuardRunner:
        """The guards, for a desk or a worker."""
        return GuardRunner(self.guard, self._plans, self._clock, ledger, can_request_approval=can_request_approval)

    def _build_ledger(self, engine: Engine) -> Ledger | None:
        from holdfast.factory import build_ledger

        return build_ledger(self.settings, engine, self._clock)

    def _build_outbox(self, ledger: Ledger | None) -> OutboxHandle | None:
        from holdfast.factory import build_outbox

        return build_outbox(self.settings, ledger, self._clock)

    def _build_engine(self) -> Engine:
        # Here, so that an app on SQLite does not load the Redis client.
        from holdfast.factory import build_engine

        return build_engine(self.settings, self._clock)

    def _register(
        self, function: Callable[..., Any], name: str | None, queue: str, policy: TaskPolicy, priority: Priority
    ) -> Task[..., Any]:
        if not inspect.isroutine(function):
            raise InvalidOption(f"@app.task decorates a function, not {function!r}")
        if name is None and function.__name__ == "<lambda>":
            raise InvalidOption("a lambda has no name that a worker could know it by; give it one: app.task(name=…)")
        name = name or check_name(function.__name__, "a task's name")
        if name in self._tasks:
            raise DuplicateTask(name)
        limit = self.settings.payload_limit
        plan = TaskSpec(name, function, policy, limit)
        task: Task[..., Any] = Task(self, plan, queue, priority)
        self._tasks[name] = task
        self._plans[name] = plan
        return task


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
