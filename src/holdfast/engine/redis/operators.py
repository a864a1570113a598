"""Operator changes on Redis: move and expedite single jobs, read and set queue controls (requirement H5).

`Operators` reads a job, builds what it becomes, and writes that only if the job is unchanged since; otherwise it tries
again, up to a limit. An audit entry is appended to the feed by the script that makes the change.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from holdfast.core.job import Approval, Failure, JobInfo, Meta, new_job_ids
from holdfast.core.states import EXPEDITED_EVENT, FINAL, OPERATOR_TARGETS, State, is_legal, resolve_event
from holdfast.core.verdict import (
    APPROVAL_EXPIRED,
    APPROVAL_REJECTED,
    operator_failure,
    waits_for,
    with_approval,
    with_retries_reset,
)
from holdfast.engine.port.operators import QueueControl, TenantControl, check_control
from holdfast.engine.redis import wire
from holdfast.engine.redis.keys import RETRY_CONSUMER
from holdfast.engine.redis.net.client import Purpose
from holdfast.engine.redis.reads import info_from_reply
from holdfast.engine.redis.settlement import fixed_keys
from holdfast.engine.redis.store import RedisStore
from holdfast.engine.redis.wire import decode_control
from holdfast.errors import ControlChanged, TransitionInvalid, UnknownJob

#: Controls that change under our eyes this often in a row are being set by someone in a loop.
_MAX_CONTROL_TRIES: Final = 20


class AuditContext(NamedTuple):
    """Whose hand it is, and why; and how the operators' log calls what it does (empty: it does not tell)."""

    actor: str
    reason: str
    audit: str = ""

    def log(self, before: Any, after: Any, target: str, target_id: str) -> dict[str, Any]:
        """What the operators' log says."""
        said = {"actor": self.actor, "reason": self.reason, "before": before, "after": after}
        return said | {"target": target, "target_id": target_id}


class Controls:
    """Reads and sets what operators allow."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def get(self, queue: str) -> QueueControl:
        return decode_control(await self._store.client.call(Purpose.OTHER, b"HGETALL", self._store.keys(queue).control))

    async def set(self, queue: str, control: QueueControl, expected: QueueControl | None, hand: AuditContext) -> None:
        check_control(control)
        await self._store.register_queue(queue)
        if expected is not None or not hand.audit:
            if not await self._set(queue, control, expected, hand):
                raise ControlChanged(queue)
            return
        # The log tells what was before: look, and set if it is still so.
        for _ in range(_MAX_CONTROL_TRIES):
            if await self._set(queue, control, await self.get(queue), hand):
                return
        raise ControlChanged(queue)

    async def _set(self, queue: str, control: QueueControl, expected: QueueControl | None, hand: AuditContext) -> bool:
        store, keys = self._store, self._store.keys(queue)
        data = b""
        if hand.audit:
            before, after = msgspec.to_builtins(expected), msgspec.to_builtins(control)
            data = msgspec.json.encode(hand.log(before, after, "queue", queue))
        named = [part for tenant, allowed in control.tenants.items() for part in (tenant, *_limits(allowed))]
        arguments: list[Any] = [store.nonce(), store.feed_limit, hand.audit, data, wire.pack(named)]
        arguments.append(int(expected is not None))
        seen = encode_control(expected or QueueControl())
        for field, value in encode_control(control).items():
            arguments += (field, value, seen[field])
        names = [keys.control, keys.notices, keys.wake, keys.feed, keys.lanes]
        return bool(await store.run(Purpose.OTHER, "control", queue, names, arguments) == b"ok")


def _limits(control: TenantControl) -> tuple[int, int, int]:
    """Weight, concurrency, intake limit as scripts know them."""
    concurrency = -1 if control.concurrency is None else control.concurrency
    return control.weight, concurrency, -1 if control.intake_limit is None else control.intake_limit


def encode_control(control: QueueControl) -> dict[str, str]:
    """The other way; empty: not set. The same controls give the same text."""

    def count(value: int | None) -> str:
        return "" if value is None else str(value)

    tenants = {tenant: control.tenants[tenant] for tenant in sorted(control.tenants)}
    return {
        "paused": "1" if control.paused else "",
        "intake_paused": "1" if control.intake_paused else "",
        "concurrency": count(control.concurrency),
        "intake_limit": count(control.intake_limit),
        "backlog_alert": count(control.backlog_alert),
        "tenants": wire.encode_json(tenants).decode() if tenants else "",
    }


#: A job that changes under our eyes this often in a row is being moved by someone in a loop.
_MAX_MOVE_TRIES: Final = 20
#: The failure of a job that ended without people's yes.
_CODES: Final = {"approval.rejected": APPROVAL_REJECTED, "approval.expired": APPROVAL_EXPIRED}


class Operators:
    """Moves single jobs: look, build what the job becomes, and write if it is still as it was seen."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def move(
        self,
        queue: str,
        job_id: str,
        to: State,
        hand: AuditContext,
        expected: State | None,
        event: str,
        consent: Approval | None,
        approval_id: str,
    ) -> State:
        for _ in range(_MAX_MOVE_TRIES):
            answer = await self._try(queue, job_id, to, hand, expected, event, consent, approval_id)
            if answer[0] == b"applied":
                self._store.counts.moved_to_dlq += to is State.DLQ_PENDING
                return State(answer[1].decode())
            if answer[0] == b"unknown":
                raise UnknownJob(job_id)
            if answer[0] == b"illegal":
                self._store.counts.illegal_moves += 1
                raise TransitionInvalid(job_id, answer[1].decode(), to)
        raise TransitionInvalid(job_id, "changing", to)

    async def expedite(self, queue: str, job_id: str, hand: AuditContext) -> None:
        store, keys = self._store, self._store.keys(queue)
        for _ in range(_MAX_MOVE_TRIES):
            looked = await self._look(queue, job_id)
            if not looked:
                raise UnknownJob(job_id)
            view = info_from_reply(queue, job_id, looked)
            now_ms = await store.now_ms(queue)
            before = {"state": view.state.value, "next_attempt_at_ms": view.next_attempt_at_ms}
            log = hand.log(before, before | {"next_attempt_at_ms": now_ms}, "job", job_id)
            told = {"actor": hand.actor, "reason": hand.reason, "next_attempt_at_ms": now_ms}
            arguments = [store.nonce(), store.feed_limit, job_id, looked[0].partition(b"\n")[0]]
            arguments += (view.attempt, view.meta.retry_count, EXPEDITED_EVENT)
            arguments.append(msgspec.json.encode(told))
            arguments += (hand.audit, msgspec.json.encode(log), view.tenant_id)
            names = [
                keys.job(job_id),
                keys.delayed,
                keys.retry,
                keys.pending_retries,
                keys.feed,
                keys.control,
                keys.notices,
            ]
            word = await store.run(Purpose.OTHER, "expedite", queue, names, arguments)
            if word == b"ok":
                return
            if word == b"idle":
                self._store.counts.illegal_moves += 1
                raise TransitionInvalid(job_id, view.state, State.RUNNING)
        raise TransitionInvalid(job_id, "changing", State.RUNNING)

    async def _look(self, queue: str, job_id: str) -> Any:
        """What `get` says of it; empty if it is unknown."""
        store, keys = self._store, self._store.keys(queue)
        names = [*keys.streams, keys.pending_retries, keys.retry, keys.delayed, keys.waiters, keys.job(job_id)]
        arguments, lanes = [store.names.group, 0, job_id], store.lanes(queue).all()
        return (await store.run_with_lanes(Purpose.OTHER, "get", queue, names, arguments, lanes))[0]

    async def _try(
        self,
        queue: str,
        job_id: str,
        to: State,
        hand: AuditContext,
        expected: State | None,
        event: str,
        consent: Approval | None,
        approval_id: str,
    ) -> list[bytes]:
        store, keys = self._store, self._store.keys(queue)
        looked = await self._look(queue, job_id)
        if not looked:
            return [b"unknown"]
        view = info_from_reply(queue, job_id, looked)
        # The script moves nothing if the record has changed since this look, and each request for approval changes it.
        if to not in OPERATOR_TARGETS or not waits_for(view.state, view.meta, approval_id):
            return [b"illegal", view.state.value.encode()]
        if expected in (None, view.state) and is_legal(view.state, to):
            event = resolve_event(view.state, to, event)
        now_ms = await store.now_ms(queue)
        failure = _failure(view, to, hand, event)
        meta = _meta(view, to, consent)
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
            looked[0].partition(b"\n")[0],
            wire.encode_record(body),
            msgspec.json.encode(_data(body, failure, to, hand, consent, now_ms)),
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
            wire.encode_failure(failure) if failure else hand.reason,
            _lease_seen(looked),
            view.tenant_id,
            msgspec.json.encode({"dlq_id": meta.dlq_id}),
            event,
            hand.audit,
            msgspec.json.encode(hand.log(view.state.value, to.value, "job", job_id)) if hand.audit else b"",
        ]
        names = [*fixed_keys(keys), keys.job(job_id), key]
        lanes = store.lanes(queue).all()
        answer: list[bytes] = await store.run_with_lanes(Purpose.OTHER, "move", queue, names, arguments, lanes)
        return answer


def _lease_seen(looked: list[Any]) -> str:
    """Who held the job at which delivery when we looked; a job that is not in line has no lease."""
    return f"{looked[2].decode()} {looked[3]}" if len(looked) > 3 else " 0"


def _meta(view: JobInfo, to: State, consent: Approval | None) -> Meta:
    meta = view.meta
    if view.state is State.SUSPENDED and to is State.QUEUED:
        return with_retries_reset(meta)
    if view.state is State.WAITING_APPROVAL:
        return with_approval(meta, consent if to is State.QUEUED else None)
    if to is State.DLQ_PENDING:
        return msgspec.structs.replace(meta, dlq_id=new_job_ids(1)[0])
    return meta


def _failure(view: JobInfo, to: State, hand: AuditContext, event: str) -> Failure | None:
    """What the record will say of the end: the job's own failure, or the operator's word."""
    if to in (State.DLQ_RECORDED, State.FAILED, State.SUSPENDED) and view.failure:
        return view.failure
    if to in FINAL or to is State.DLQ_PENDING:
        failure = operator_failure(to, hand.actor, hand.reason)
        code = _CODES.get(event)
        return msgspec.structs.replace(failure, code=code) if code else failure
    return view.failure if to is not State.QUEUED else None


def _data(
    body: wire.JobBody, failure: Failure | None, to: State, hand: AuditContext, consent: Approval | None, now_ms: int
) -> dict[str, Any]:
    data: dict[str, Any] = {"actor": hand.actor, "reason": hand.reason}
    meta = wire.decode_meta(body.meta)
    if to is State.DLQ_PENDING and failure:
        data |= wire.failure_fields(failure) | {"dlq_id": meta.dlq_id, "history": meta.history}
    elif to in (State.DLQ_RECORDED, State.FAILED):
        data["dlq_id"] = meta.dlq_id
    elif to is State.QUEUED and int(body.run_at) > now_ms:
        data["next_attempt_at_ms"] = int(body.run_at)
    if to is State.QUEUED and consent is not None:
        data["consent"] = consent
    return data
