"""Registered tasks: submission of calls, typed like the function itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar, Unpack

from holdfast.client.job import Job
from holdfast.client.options import Options, SubmitOptions, make_options
from holdfast.core.job import MAX_BATCH, Envelope, Priority, Receipt, new_job_ids
from holdfast.errors import InvalidOption, InvalidPayload
from holdfast.execution.spec import TaskSpec

if TYPE_CHECKING:
    from holdfast.client.backend import Backend

P = ParamSpec("P")
R = TypeVar("R")

_TIMES: Final = frozenset({"delay", "run_at"})


@dataclass(frozen=True, slots=True)
class BoundCall(Generic[R]):
    """A call with its own options, for `submit_many`; made by `task.options(…).bind(…)`."""

    spec: TaskSpec
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    given: SubmitOptions


class BoundTask(Generic[P, R]):
    """A task with the options of its submissions."""

    def __init__(
        self,
        backend: Backend,
        spec: TaskSpec,
        make: Callable[[SubmitOptions], Options],
        given: SubmitOptions | None = None,
    ) -> None:
        """`make` checks options and adds the task's own."""
        self.spec = spec
        self._backend = backend
        self._make = make
        self._given = given or SubmitOptions()
        self._options = make(self._given)

    async def submit(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Submit one call. When this returns, the job is accepted and will not be lost."""
        options, spec = self._options, self.spec
        payload = spec.arguments.encode(args, kwargs, spec.payload_limit)
        envelope = options.envelope(new_job_ids(1)[0], spec.name, payload, spec.fingerprint)
        if options.connection is not None:
            (job,) = await self._enqueue([envelope])
            return job
        submitter = await self._backend.connections.submitter()
        receipt = await submitter.submit(envelope)
        return Job(self._backend, receipt.job_id, options.queue, receipt.duplicate, spec.results.decode)

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> BoundCall[R]:
        """Return a call with these options, to be submitted with others by `submit_many`."""
        return BoundCall(self.spec, args, kwargs, self._given)

    async def submit_many(self, calls: Iterable[tuple[Any, ...] | BoundCall[R]]) -> list[Job[R]]:
        """Submit many calls; returns their handles in order.

        `duplicate` is set where the idempotency key was known. A call is a tuple of positional arguments, or
        `task.options(…).bind(…)` with its own options, which override those of this submission. All calls are checked
        before the first job is sent. They are sent in batches of 500; the jobs of a batch in one queue are accepted
        whole or not at all. `IntakeLimited.fits` says how many of a refused batch would fit. With more than one batch,
        some may be accepted and others not.
        """
        if self._options.idempotency_key:
            raise InvalidOption("one idempotency_key cannot serve many jobs; give each its own with options(…).bind(…)")
        payloads, own = await self._payloads(calls)
        if self._options.connection is not None:
            return await self._enqueue(list(self._envelopes(payloads, own)))
        submitter = await self._backend.connections.submitter()
        receipts = await submitter.submit_many(self._envelopes(payloads, own))
        decode = self.spec.results.decode
        return [
            Job(self._backend, receipt.job_id, own.get(number, self._options).queue, receipt.duplicate, decode)
            for number, receipt in enumerate(receipts)
        ]

    def submit_sync(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """`submit` for code without an event loop: Django, scripts, threads."""
        if self._options.connection is not None:
            return self._enqueue_sync(args, kwargs)
        return self._backend.portal.call("submit_sync", lambda: self.submit(*args, **kwargs), "await task.submit(…)")

    # In the user's own transaction ---------------------------------------------------------------------

    async def _enqueue(self, envelopes: list[Envelope]) -> list[Job[R]]:
        receipts = await self._backend.enqueue_in_transaction(self._options.connection, envelopes)
        return [
            self._transactional_job(envelope, receipt) for envelope, receipt in zip(envelopes, receipts, strict=True)
        ]

    def _enqueue_sync(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Job[R]:
        spec = self.spec
        payload = spec.arguments.encode(args, kwargs, spec.payload_limit)
        envelope = self._options.envelope(new_job_ids(1)[0], spec.name, payload, spec.fingerprint)
        (receipt,) = self._backend.enqueue_in_transaction_sync(self._options.connection, [envelope])
        return self._transactional_job(envelope, receipt)

    def _transactional_job(self, envelope: Envelope, receipt: Receipt) -> Job[R]:
        decode = self.spec.results.decode
        return Job(
            self._backend, receipt.job_id, envelope.queue, receipt.duplicate, decode, outbox_of=envelope.tenant_id
        )

    async def _payloads(
        self, calls: Iterable[tuple[Any, ...] | BoundCall[R]]
    ) -> tuple[list[bytes], dict[int, Options]]:
        """The payloads of the calls, and the options of calls that have their own, by number."""
        encode, limit, payloads = self.spec.arguments.encode, self.spec.payload_limit, list[bytes]()
        own: dict[int, Options] = {}
        for number, call in enumerate(calls):
            if isinstance(call, BoundCall):
                own[number] = self._own_options(call)
                payloads.append(encode(call.args, dict(call.kwargs), limit))
            else:
                payloads.append(encode(_tuple(call), {}, limit))
            if (number + 1) % MAX_BATCH == 0:
                # A million calls take seconds to check: let other work on this loop run meanwhile.
                await asyncio.sleep(0)
        return payloads, own

    def _own_options(self, call: BoundCall[R]) -> Options:
        if call.spec is not self.spec:
            raise InvalidOption(
                f"a call of task {call.spec.name!r} cannot be submitted with those of {self.spec.name!r}"
            )
        if call.given.get("connection") is not None:
            raise InvalidOption(
                "all jobs of a submission share one connection; use task.options(connection=…).submit_many(…)"
            )
        own: dict[str, Any] = {name: value for name, value in call.given.items() if value is not None}
        # The call's own time replaces the shared one, whether given as delay or run_at.
        replaced = _TIMES if own.keys() & _TIMES else frozenset()
        shared = {name: value for name, value in self._given.items() if name not in replaced}
        merged: Any = {**shared, **own}
        return self._make(merged)

    def _envelopes(self, payloads: list[bytes], own: Mapping[int, Options]) -> Iterator[Envelope]:
        shared, name, schema = self._options, self.spec.name, self.spec.fingerprint
        for start in range(0, len(payloads), MAX_BATCH):
            batch = payloads[start : start + MAX_BATCH]
            for number, (job_id, payload) in enumerate(zip(new_job_ids(len(batch)), batch, strict=True), start):
                yield own.get(number, shared).envelope(job_id, name, payload, schema)


class Task(BoundTask[P, R]):
    """A registered function, as `@app.task` returns it."""

    def __init__(self, backend: Backend, spec: TaskSpec, queue: str, priority: Priority) -> None:
        self.queue = queue
        self.priority = priority
        super().__init__(backend, spec, self._make_options)
        self.name = spec.name
        self.function: Callable[..., Any] = spec.function
        self.__doc__ = spec.function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the plain function directly: no job, no retry, no engine."""
        return self.function(*args, **kwargs)

    def options(self, **given: Unpack[SubmitOptions]) -> BoundTask[P, R]:
        """Return the task with options for its submissions.

        `idempotency_key`: a second submission of this call with it (same tenant and queue) returns the first job.
        Another call, or another task, with the same key raises `IdempotencyKeyReused`; `on_key_reuse="return"` returns
        the first job then, too.
        `delay` or `run_at` (aware): earliest start. `retry` replaces the task's policy for this job.
        `context`: JSON values that the task reads as `ctx.context`. `hold`: it must be approved first.
        `durable`: submitting returns when the ledger has the job; `NotDurableYet` if that takes too long.
        `webhook`: an address that is notified of the job's end, signed; see `holdfast.webhooks`.
        `connection`: the job is part of the transaction open there, see `app.outbox`. A relay submits it after the
        commit; after a rollback there is no job.
        """
        return BoundTask(self._backend, self.spec, self._make_options, given)

    def _make_options(self, given: SubmitOptions) -> Options:
        limit = self.spec.payload_limit
        return make_options(given, queue=self.queue, priority=self.priority, payload_limit=limit)

    def __repr__(self) -> str:
        return f"<Task {self.name!r} on queue {self.queue!r}>"


def _tuple(call: object) -> tuple[Any, ...]:
    if isinstance(call, tuple | list):
        return tuple(call)
    raise InvalidPayload(f"submit_many takes tuples of arguments, got {call!r}; for one argument write (argument,)")
