"""Operator changes on Redis: move, expedite and claim jobs, set queue controls (requirement H5).

`Operators` reads a job, builds what it becomes, and writes that only if the job is unchanged since; otherwise it tries
again, up to a limit. An audit entry is appended to the feed by the script that makes the change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from holdfast.core.job import Approval, Claim, Failure, JobInfo, Meta, decode_meta, new_job_ids
from holdfast.core.states import EXPEDITED_EVENT, FINAL, OPERATOR_TARGETS, State, is_legal, resolve_event
from holdfast.core.verdict import operator_failure, waits_for, with_approval, with_retries_reset
from holdfast.engine.port.operators import QueueControl, TenantControl, check_control
from holdfast.engine.redis import wire
from holdfast.engine.redis.controls import encode_control, read_control
from holdfast.engine.redis.keys import RETRY_CONSUMER
from holdfast.engine.redis.net.client import Purpose
from holdfast.engine.redis.reads import info_from_reply
from holdfast.engine.redis.settlement import fixed_keys
from holdfast.engine.redis.store import RedisStore
from holdfast.errors import ConcurrencyLimited, ControlChanged, TransitionInvalid, UnknownJob

#: Attempts to set controls that change between read and write, before the call fails.
_MAX_CONTROL_TRIES: Final = 20


class AuditContext(NamedTuple):
    """Who changes something and why; `audit` is the type of the audit entry (empty: none is written)."""

    actor: str
    reason: str
    audit: str = ""

    def log(self, before: Any, after: Any, target: str, target_id: str) -> dict[str, Any]:
        """Data of the audit entry."""
        data = {"actor": self.actor, "reason": self.reason, "before": before, "after": after}
        return data | {"target": target, "target_id": target_id}


class Controls:
    """Sets the controls of queues."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def set(self, queue: str, control: QueueControl, expected: QueueControl | None, audit: AuditContext) -> None:
        check_control(control)
        await self._store.register_queue(queue)
        if expected is None and not audit.audit:
            await self._set(queue, control, None, {}, audit)
            return
        # The audit entry has the controls before the change: read them, and set only if they are unchanged.
        for _ in range(_MAX_CONTROL_TRIES):
            before, fields = await read_control(self._store, queue)
            if expected is not None and before != expected:
                break
            if await self._set(queue, control, before, wire.as_dict(fields), audit):
                return
        raise ControlChanged(queue)

    async def _set(
        self,
        queue: str,
        control: QueueControl,
        expected: QueueControl | None,
        old: Mapping[bytes, bytes],
        audit: AuditContext,
    ) -> bool:
        """Set the controls if the fields are still `old`, which may be unreadable; False: they have changed."""
        store, keys = self._store, self._store.keys(queue)
        data = b""
        if audit.audit:
            before, after = msgspec.to_builtins(expected), msgspec.to_builtins(control)
            data = msgspec.json.encode(audit.log(before, after, "queue", queue))
        limits = [part for tenant, each in control.tenants.items() for part in (tenant, *_limits(each))]
        arguments: list[Any] = [store.nonce(), store.feed_limit, audit.audit, data, wire.pack(limits)]
        arguments.append(int(expected is not None))
        for field, value in encode_control(control).items():
            arguments += (field, value, old.get(field.encode(), b""))
        names = [keys.control, keys.notices, keys.wake, keys.feed, keys.lanes]
        return bool(await store.run(Purpose.OTHER, "set_control", queue, names, arguments) == b"ok")


def _limits(control: TenantControl) -> tuple[int, int, int]:
    """Weight, concurrency and intake limit as scripts expect them; -1: no limit."""
    concurrency = -1 if control.concurrency is None else control.concurrency
    return control.weight, concurrency, -1 if control.intake_limit is None else control.intake_limit


#: Attempts to change a job that changes between read and write, before the call fails.
_MAX_MOVE_TRIES: Final = 20


class Operators:
    """Moves single jobs: read the job, build its next record, and write it if the job is unchanged."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def move(
        self,
        queue: str,
        job_id: str,
        to: State,
        audit: AuditContext,
        expected: State | None,
        event: str,
        approval: Approval | None,
        approval_id: str,
    ) -> State:
        for _ in range(_MAX_MOVE_TRIES):
            answer = await self._try(queue, job_id, to, audit, expected, event, approval, approval_id)
            if answer[0] == b"applied":
                self._store.counters.moved_to_dlq += to is State.DLQ_PENDING
                return State(answer[1].decode())
            if answer[0] == b"unknown":
                raise UnknownJob(job_id)
            if answer[0] == b"illegal":
                self._store.counters.illegal_moves += 1
                raise TransitionInvalid(job_id, answer[1].decode(), to)
        raise TransitionInvalid(job_id, "changing", to)

    async def expedite(self, queue: str, job_id: str, audit: AuditContext) -> None:
        store, keys = self._store, self._store.keys(queue)
        for _ in range(_MAX_MOVE_TRIES):
            reply = await self._read(queue, job_id)
            if not reply:
                raise UnknownJob(job_id)
            view = info_from_reply(queue, job_id, reply)
            if view is None:
                raise UnknownJob(job_id)
            now_ms = await store.now_ms(queue)
            before = {"state": view.state.value, "next_attempt_at_ms": view.next_attempt_at_ms}
            log = audit.log(before, before | {"next_attempt_at_ms": now_ms}, "job", job_id)
            data = {"actor": audit.actor, "reason": audit.reason, "next_attempt_at_ms": now_ms}
            arguments = [store.nonce(), store.feed_limit, job_id, reply[0].partition(b"\n")[0]]
            arguments += (view.attempt, view.meta.retry_count, EXPEDITED_EVENT)
            arguments.append(msgspec.json.encode(data))
            arguments += (audit.audit, msgspec.json.encode(log), view.tenant_id)
            names = [
                keys.job(job_id),
                keys.delayed,
                keys.retry,
                keys.pending_retries,
                keys.feed,
                keys.control,
                keys.notices,
            ]
            status = await store.run(Purpose.OTHER, "expedite", queue, names, arguments)
            if status == b"ok":
                return
            if status == b"idle":
                self._store.counters.illegal_moves += 1
                raise TransitionInvalid(job_id, view.state, State.RUNNING)
        raise TransitionInvalid(job_id, "changing", State.RUNNING)

    async def claim_job(self, worker: str, queue: str, job_id: str) -> Claim:
        """Claim one queued or retrying job, wherever it waits."""
        store, keys = self._store, self._store.keys(queue)
        names = [
            *keys.streams,
            keys.feed,
            keys.delayed,
            keys.retry,
            keys.pending_retries,
            keys.control,
            keys.wake,
            keys.lanes,
        ]
        names += [keys.workers, keys.job(job_id)]
        arguments = [store.names.group, worker, store.nonce(), store.feed_limit, job_id, RETRY_CONSUMER]
        lanes = store.lanes(queue).all()
        status, *rest = await store.run_with_lanes(Purpose.CLAIM, "claim_job", queue, names, arguments, lanes)
        if status == b"unknown":
            raise UnknownJob(job_id)
        if status == b"illegal":
            store.counters.illegal_moves += 1
            raise TransitionInvalid(job_id, State(rest[0].decode()), State.RUNNING)
        if status == b"limited":
            raise ConcurrencyLimited(queue, rest[0])
        now_ms, index, entry = rest
        store.counters.claimed += 1
        parse = wire.parse_entry if wire.is_native(entry[1]) else wire.parse_adopted
        try:
            return parse(entry, index, queue, worker, 1, int(now_ms))
        except wire.MalformedMessage as exc:
            # Its lease expires, and then it becomes a dead letter.
            raise UnknownJob(job_id) from exc

    async def _read(self, queue: str, job_id: str) -> Any:
        """The reply of the script `get`; empty if the job is unknown."""
        store, keys = self._store, self._store.keys(queue)
        names = [*keys.streams, keys.pending_retries, keys.retry, keys.delayed, keys.waiters, keys.control]
        names.append(keys.job(job_id))
        arguments, lanes = [store.names.group, 0, job_id], store.lanes(queue).all()
        return (await store.run_with_lanes(Purpose.OTHER, "get", queue, names, arguments, lanes))[0]

    async def _try(
        self,
        queue: str,
        job_id: str,
        to: State,
        audit: AuditContext,
        expected: State | None,
        event: str,
        approval: Approval | None,
        approval_id: str,
    ) -> list[bytes]:
        store, keys = self._store, self._store.keys(queue)
        reply = await self._read(queue, job_id)
        if not reply:
            return [b"unknown"]
        view = info_from_reply(queue, job_id, reply)
        if view is None:
            return [b"unknown"]
        # The script moves nothing if the record has changed since this read, and each approval request changes it.
        if to not in OPERATOR_TARGETS or not waits_for(view.state, view.meta, approval_id):
            return [b"illegal", view.state.value.encode()]
        if expected in (None, view.state) and is_legal(view.state, to):
            event = resolve_event(view.state, to, event)
        now_ms = await store.now_ms(queue)
        failure = _failure(view, to, audit, event)
        meta = _meta(view, to, approval)
        body = wire.record_from_info(
            view,
            meta,
            failure=wire.encode_failure(failure) if failure else "",
            finished_at_ms=now_ms,
        )
        dead_letter = b""
        if to in (State.DLQ_PENDING, State.DLQ_RECORDED) and failure:
            dead_letter = wire.pack(wire.dead_letter_fields(job_id, body, failure, meta.dlq_id))
        explicit = view.idempotency_key not in ("", job_id)
        key = keys.idempotency(view.tenant_id, view.idempotency_key) if explicit else keys.job(job_id)
        options = store.options
        arguments: list[Any] = [
            store.names.group,
            store.nonce(),
            store.feed_limit,
            job_id,
            to.value,
            expected.value if expected else "",
            reply[0].partition(b"\n")[0],
            wire.encode_record(body),
            msgspec.json.encode(_data(body, failure, to, audit, approval, now_ms)),
            options.finished_ttl_ms,
            options.result_limit,
            int(options.ledger),
            int(bool(store.names.stream_dlq)),
            dead_letter,
            RETRY_CONSUMER,
            int(explicit),
            max(1, (meta.key_window_ms or options.idempotency_window_ms) - (now_ms - view.created_at_ms)),
            view.attempt,
            meta.retry_count,
            wire.encode_failure(failure) if failure else audit.reason,
            _lease_of(reply),
            view.tenant_id,
            msgspec.json.encode({"dlq_id": meta.dlq_id}),
            event,
            audit.audit,
            msgspec.json.encode(audit.log(view.state.value, to.value, "job", job_id)) if audit.audit else b"",
        ]
        names = [*fixed_keys(keys), keys.job(job_id), key]
        lanes = store.lanes(queue).all()
        answer: list[bytes] = await store.run_with_lanes(Purpose.OTHER, "move", queue, names, arguments, lanes)
        return answer


def _lease_of(reply: list[Any]) -> str:
    """Owner and delivery count of the job at this read; a job without a message has no lease."""
    return f"{reply[2].decode()} {reply[3]}" if len(reply) > 3 else " 0"


def _meta(view: JobInfo, to: State, approval: Approval | None) -> Meta:
    meta = view.meta
    if view.state is State.SUSPENDED and to is State.QUEUED:
        return with_retries_reset(meta)
    if view.state is State.WAITING_APPROVAL:
        return with_approval(meta, approval if to is State.QUEUED else None)
    if to is State.DLQ_PENDING:
        return msgspec.structs.replace(meta, dlq_id=new_job_ids(1)[0])
    return meta


def _failure(view: JobInfo, to: State, audit: AuditContext, event: str) -> Failure | None:
    """The failure for the new record: the job's own, or one with the operator's reason."""
    if to in (State.DLQ_RECORDED, State.FAILED, State.SUSPENDED) and view.failure:
        return view.failure
    if to in FINAL or to is State.DLQ_PENDING:
        return operator_failure(to, audit.actor, audit.reason, event)
    return view.failure if to is not State.QUEUED else None


def _data(
    body: wire.JobBody, failure: Failure | None, to: State, audit: AuditContext, approval: Approval | None, now_ms: int
) -> dict[str, Any]:
    data: dict[str, Any] = {"actor": audit.actor, "reason": audit.reason}
    meta = decode_meta(body.meta)
    if to is State.DLQ_PENDING and failure:
        data |= wire.failure_fields(failure) | {"dlq_id": meta.dlq_id, "history": meta.history}
    elif to is State.CANCELLED and failure:
        data |= wire.failure_fields(failure)
    elif to in (State.DLQ_RECORDED, State.FAILED):
        data["dlq_id"] = meta.dlq_id
    elif to is State.QUEUED and int(body.run_at) > now_ms:
        data["next_attempt_at_ms"] = int(body.run_at)
    if to is State.QUEUED and approval is not None:
        data["approval"] = approval
    return data
