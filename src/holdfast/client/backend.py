"""`Backend`: the internal side of an app, which `execution.backend.backend_of(app)` returns.

It holds the settings, the registered tasks, the connections of each event loop and the portal for blocking calls. It
makes envelopes and submits them, or writes them to the outbox in the user's transaction. Adapters are built by
`holdfast.factory`, which is loaded on first use, so that an app on SQLite does not load the Redis client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from holdfast.client.announced import AnnouncedTasks
from holdfast.client.configuration import Configurable
from holdfast.client.connections import LoopConnections
from holdfast.client.options import SubmitOptions, make_options
from holdfast.client.submitter import BatchingSubmitter, Submitter, TracedSubmitter
from holdfast.clock import Clock
from holdfast.core.announcement import SCHEMA_LIMIT, AnnouncedTask
from holdfast.core.codec import decode_json
from holdfast.core.fingerprint import raw_fingerprint
from holdfast.core.job import DEFAULT_QUEUE, Envelope, Priority, Receipt, new_job_ids
from holdfast.core.text import check_name
from holdfast.engine.port import Engine
from holdfast.errors import InvalidPayload, NoLedger, PayloadTooLarge, UnknownTask
from holdfast.execution.spec import TaskSpec
from holdfast.guard.registry import GuardRegistry
from holdfast.guard.runner import GuardRunner
from holdfast.ledger.port.messages import OutboxEvent
from holdfast.observe.redact import add_redaction_rules
from holdfast.observe.tracing import tracer_for
from holdfast.outbox.sql_drivers import insert_events, insert_events_sync
from holdfast.outbox.writer import Outbox, job_event_row
from holdfast.settings import Settings
from holdfast.webhooks.deliveries import WebhookPolicy

if TYPE_CHECKING:
    from holdfast.client.task import Task
    from holdfast.factory import OutboxHandle
    from holdfast.ledger.port.ledger import Ledger


class Backend(Configurable):
    """The internal side of an app: settings, tasks, connections, submission."""

    def __init__(self, given: Mapping[str, Any], settings: Settings, clock: Clock) -> None:
        """`given` are the settings given in code. Raises `MissingExtra` for a package that they need."""
        self.tasks: dict[str, Task[..., Any]] = {}
        #: The specs of the same tasks, for workers and guards.
        self.specs: dict[str, TaskSpec] = {}
        #: Tasks whose retry policy is that of the settings.
        self._retry_from_settings: set[str] = set()
        self.guard = GuardRegistry(lambda: self.settings.guard_timeout_s)
        self._outbox_writer: Outbox | None = None
        #: For submissions of an app without tasks.
        self.announced = AnnouncedTasks(lambda: self.engine, lambda: self.ledger)
        super().__init__(given, settings, clock)

    def add_task(self, task: Task[..., Any], *, retry_from_settings: bool) -> None:
        """Register a task. `retry_from_settings`: its retry policy changes with the settings."""
        self.tasks[task.name] = task
        self.specs[task.name] = task.spec
        if retry_from_settings:
            self._retry_from_settings.add(task.name)

    # Stores of the running event loop ----------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine, open or not."""
        return self.connections.engine()

    @property
    def ledger(self) -> Ledger | None:
        """The ledger, open or not; None if there is none."""
        return self.connections.ledger()

    @property
    def outbox(self) -> OutboxHandle | None:
        """The outbox as a relay reads it, open or not; None if there is neither a ledger nor `outbox_url`."""
        return self.connections.outbox()

    @property
    def outbox_writer(self) -> Outbox:
        """The outbox as users write it, `app.outbox`."""
        if self._outbox_writer is None:
            self._outbox_writer = Outbox(self.settings)
        return self._outbox_writer

    async def open(self) -> None:
        """Open engine and ledger. Can be repeated. An unreachable ledger is logged."""
        await self.connections.open()

    async def close(self) -> None:
        """Close the connections of this event loop and of the portal. The next use opens new ones."""
        if self.portal.is_open:
            await asyncio.to_thread(self.portal.close, self.connections.close)
        await self.connections.close()

    def require_ledger(self) -> None:
        """Raise `LedgerRefused` if the ledger refused the connection when it was opened.

        For programs that should not start with a wrong user, password or database. An unreachable ledger raises
        nothing.
        """
        if (refusal := self.connections.ledger_refusal()) is not None:
            raise refusal

    def guard_runner(self, ledger: Ledger | None, *, can_request_approval: bool | None = None) -> GuardRunner:
        """The app's guards, for a submitter or a worker."""
        return GuardRunner(self.guard, self.specs, self.clock, ledger, can_request_approval=can_request_approval)

    # Submission --------------------------------------------------------------------------------------

    def announcements(self) -> list[AnnouncedTask]:
        """The tasks of this app, as its workers announce them."""
        return [_announcement(task) for task in self.tasks.values()]

    def envelope(
        self, task: str, payload: bytes, announced: AnnouncedTask | None = None, **options: Unpack[SubmitOptions]
    ) -> Envelope:
        """Check task, payload and options; return an envelope with a new job id.

        `announced`: what `self.announced` returned for the payload, if the app has no tasks.
        """
        if not isinstance(payload, bytes):
            raise InvalidPayload(
                f"the payload of submit_raw is JSON as bytes, not a {type(payload).__name__}; use "
                "json.dumps(…).encode(), or the task's own submit(…), which takes arguments"
            )
        known = self.tasks.get(task)
        if known is None and self.tasks:
            raise UnknownTask(task, tuple(self.tasks))
        limit = self.settings.payload_limit
        if len(payload) > limit:
            raise PayloadTooLarge(f"the payload of task {task!r}", len(payload), limit)
        if known is None:
            decode_json(payload, f"the payload of task {check_name(task, 'task')!r}")
        else:
            known.spec.decode(payload)
        queue, priority, schema = DEFAULT_QUEUE, Priority.NORMAL, ""
        if known is not None:
            queue, priority, schema = known.queue, known.priority, known.spec.fingerprint
        elif announced is not None:
            queue, priority, schema = announced.queue, Priority(announced.priority), announced.fingerprint
        chosen = make_options(options, queue=queue, priority=priority, payload_limit=limit)
        return chosen.envelope(new_job_ids(1)[0], task, payload, schema)

    def fingerprint(self, task: str, payload: bytes) -> str:
        """The fingerprint of a request, kept with its idempotency key; see `core.fingerprint`."""
        spec = self.specs.get(task)
        return raw_fingerprint(task, payload) if spec is None else spec.arguments.fingerprint(payload)

    # In the user's transaction -----------------------------------------------------------------------

    async def enqueue_in_transaction(self, connection: Any, envelopes: Sequence[Envelope]) -> list[Receipt]:
        """Write jobs to the outbox in the transaction open on this connection.

        A relay submits them after the commit. Inline mode runs them immediately.
        """
        if self.connections.inline_submitter is not None:
            return await self.connections.inline_submitter.submit_many(envelopes)
        if not envelopes:
            return []
        with self._trace(envelopes) as traced:
            prepared = await self.connections.prepare(traced)
            await insert_events(connection, [job_event_row(envelope) for envelope in prepared])
        return [Receipt(envelope.job_id) for envelope in prepared]

    def enqueue_in_transaction_sync(self, connection: Any, envelopes: Sequence[Envelope]) -> list[Receipt]:
        """`enqueue_in_transaction` on a blocking connection.

        The connection stays in this thread; guards run in the portal.
        """
        submitter = self.connections.inline_submitter
        if submitter is not None:
            return self.portal.call("submit_sync", lambda: submitter.submit_many(envelopes), "await task.submit(…)")
        with self._trace(envelopes) as traced:
            prepared = self.portal.call("submit_sync", lambda: self.connections.prepare(traced), "await task.submit(…)")
            insert_events_sync(connection, [job_event_row(envelope) for envelope in prepared])
        return [Receipt(envelope.job_id) for envelope in prepared]

    async def transactional_event(self, tenant_id: str, job_id: str) -> OutboxEvent | None:
        """The outbox event of a job that was submitted in a transaction.

        None unless the transaction is committed and visible to the relay, and None in inline mode. Raises `NoLedger` if
        the app has no outbox.
        """
        if self.connections.inline_submitter is not None:
            return None
        outbox = self.connections.outbox()
        if outbox is None:
            raise NoLedger("to know the outcome of a job that was submitted in a transaction")
        return await (await outbox.open()).get(tenant_id, job_id)

    @contextmanager
    def _trace(self, envelopes: Sequence[Envelope]) -> Iterator[Sequence[Envelope]]:
        tracer = tracer_for(self.settings.tracing)
        if tracer is None:
            yield envelopes
        else:
            with tracer.submit_span(envelopes) as (traced, _):
                yield traced

    # Settings and adapters ---------------------------------------------------------------------------

    def _settings_changed(self) -> None:
        self._outbox_writer = None
        add_redaction_rules(self.settings.redact)
        for spec in self.specs.values():
            spec.payload_limit = self.settings.payload_limit
        for name in self._retry_from_settings:
            spec = self.specs[name]
            spec.policy = replace(spec.policy, retry=self.settings.retry)

    def _make_connections(self, settings: Settings) -> LoopConnections:
        return LoopConnections(
            self._build_engine,
            self._build_ledger,
            settings.durable_timeout_s,
            self.guard_runner,
            lambda ledger: WebhookPolicy(self.settings, ledger),
            self._wrap_submitter,
            self._build_outbox,
            settings.opens_unverified_after_s,
            temporary=settings.isolated,
        )

    def _wrap_submitter(self, submitter: BatchingSubmitter) -> Submitter:
        tracer = tracer_for(self.settings.tracing)
        return submitter if tracer is None else TracedSubmitter(submitter, tracer)

    def _build_engine(self) -> Engine:
        from holdfast.factory import build_engine

        return build_engine(self.settings, self.clock, self.fingerprint)

    def _build_ledger(self, engine: Engine) -> Ledger | None:
        from holdfast.factory import build_ledger

        return build_ledger(self.settings, engine, self.clock)

    def _build_outbox(self, ledger: Ledger | None) -> OutboxHandle | None:
        from holdfast.factory import build_outbox

        return build_outbox(self.settings, ledger, self.clock)


def _announcement(task: Task[..., Any]) -> AnnouncedTask:
    schema = task.spec.schema
    text = "" if schema is None else msgspec.json.encode(schema).decode()
    return AnnouncedTask(
        task=task.name,
        queue=task.queue,
        fingerprint=task.spec.fingerprint,
        schema=text if len(text) <= SCHEMA_LIMIT else "",
        priority=int(task.priority),
    )
