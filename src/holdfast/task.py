"""A registered function: submit it with its own arguments, typed like the function itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar, Unpack

from holdfast.core.job import Envelope, Priority, Receipt, new_job_ids
from holdfast.engine.port import MAX_BATCH
from holdfast.errors import InvalidOption, InvalidPayload
from holdfast.handle import Job, Way
from holdfast.options import Options, SubmitOptions, make_options
from holdfast.worker.plan import Plan

P = ParamSpec("P")
R = TypeVar("R")


class Submittable(Generic[P, R]):
    """A task together with the options its jobs are submitted with."""

    def __init__(self, way: Way, plan: Plan, options: Options) -> None:
        self.plan = plan
        self._way = way
        self._options = options

    async def submit(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Submit one call. Once this returns the job is accepted and will not be lost."""
        options, plan = self._options, self.plan
        payload = plan.arguments.encode(args, kwargs, plan.payload_limit)
        envelope = options.envelope(new_job_ids(1)[0], plan.name, payload)
        if options.connection is not None:
            (job,) = await self._enlist([envelope])
            return job
        desk = await self._way.desk()
        receipt = await desk.submit(envelope)
        return Job(self._way, receipt.job_id, options.queue, receipt.duplicate, plan.arguments.decode_result)

    async def submit_many(self, calls: Iterable[tuple[Any, ...]]) -> list[Job[R]]:
        """Submit many calls, each a tuple of positional arguments; a handle each, in order.

        All arguments are checked before the first job is sent. Sent in batches of 500: if the engine fails
        half-way some are accepted and some are not.
        """
        if self._options.idempotency_key:
            raise InvalidOption("one idempotency_key cannot serve many jobs; submit them one by one with their keys")
        queue, decode = self._options.queue, self.plan.arguments.decode_result
        payloads = await self._payloads(calls)
        if self._options.connection is not None:
            return await self._enlist(list(self._envelopes(payloads)))
        desk = await self._way.desk()
        receipts = await desk.submit_many(self._envelopes(payloads))
        return [Job(self._way, receipt.job_id, queue, receipt.duplicate, decode) for receipt in receipts]

    def submit_sync(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """`submit` for code without an event loop: Django, scripts, threads."""
        if self._options.connection is not None:
            return self._enlist_sync(args, kwargs)
        return self._way.door.call("submit_sync", lambda: self.submit(*args, **kwargs), "await task.submit(…)")

    # In the user's own transaction ---------------------------------------------------------------------

    async def _enlist(self, envelopes: list[Envelope]) -> list[Job[R]]:
        receipts = await self._way.enlist(self._options.connection, envelopes)
        return [self._enlisted(envelope, receipt) for envelope, receipt in zip(envelopes, receipts, strict=True)]

    def _enlist_sync(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Job[R]:
        plan = self.plan
        payload = plan.arguments.encode(args, kwargs, plan.payload_limit)
        envelope = self._options.envelope(new_job_ids(1)[0], plan.name, payload)
        (receipt,) = self._way.enlist_sync(self._options.connection, [envelope])
        return self._enlisted(envelope, receipt)

    def _enlisted(self, envelope: Envelope, receipt: Receipt) -> Job[R]:
        decode = self.plan.arguments.decode_result
        return Job(self._way, receipt.job_id, envelope.queue, receipt.duplicate, decode, outbox_of=envelope.tenant_id)

    async def _payloads(self, calls: Iterable[tuple[Any, ...]]) -> list[bytes]:
        encode, limit, payloads = self.plan.arguments.encode, self.plan.payload_limit, list[bytes]()
        for number, call in enumerate(calls, 1):
            payloads.append(encode(_tuple(call), {}, limit))
            if number % MAX_BATCH == 0:
                # A million calls take seconds to check: other work on this loop goes on meanwhile.
                await asyncio.sleep(0)
        return payloads

    def _envelopes(self, payloads: list[bytes]) -> Iterator[Envelope]:
        options, name = self._options, self.plan.name
        for start in range(0, len(payloads), MAX_BATCH):
            batch = payloads[start : start + MAX_BATCH]
            for job_id, payload in zip(new_job_ids(len(batch)), batch, strict=True):
                yield options.envelope(job_id, name, payload)


class Task(Submittable[P, R]):
    """What `@app.task` makes of a function."""

    def __init__(self, way: Way, plan: Plan, options: Options, priority: Priority) -> None:
        super().__init__(way, plan, options)
        self.name = plan.name
        self.queue = options.queue
        self.priority = priority
        self.function: Callable[..., Any] = plan.function
        self.__doc__ = plan.function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The plain function, called here and now: no job, no retry, no engine."""
        return self.function(*args, **kwargs)

    def options(self, **given: Unpack[SubmitOptions]) -> Submittable[P, R]:
        """The same task with per-call policy.

        `idempotency_key`: a second submission with it (same tenant and queue) returns the first job.
        `delay` or `run_at` (aware): not before. `retry` replaces the task's policy for this job.
        `context`: JSON values that the task reads as `ctx.context`. `hold`: a person must approve it first.
        `durable`: submitting returns only once the ledger has the job; `NotDurableYet` if that takes too long.
        `webhook`: an address that is told of the job's end, signed; see `holdfast.webhooks`.
        `connection`: the job is part of the transaction that is open there, see `app.outbox`; it is handed in by a
        relay once that is committed, and never was if it is rolled back.
        """
        limit = self.plan.payload_limit
        options = make_options(given, queue=self.queue, priority=self.priority, payload_limit=limit)
        return Submittable(self._way, self.plan, options)

    def __repr__(self) -> str:
        return f"<Task {self.name!r} on queue {self.queue!r}>"


def _tuple(call: object) -> tuple[Any, ...]:
    if isinstance(call, tuple | list):
        return tuple(call)
    raise InvalidPayload(f"submit_many takes tuples of arguments, got {call!r}; for one argument write (argument,)")
