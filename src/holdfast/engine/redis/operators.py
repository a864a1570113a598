"""move and set_control: an operator's hand."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from holdfast.core.job import Failure, JobView, Meta, new_job_ids
from holdfast.core.states import FINAL, OPERATOR_TARGETS, State
from holdfast.core.verdict import by_operator, resumed
from holdfast.engine.port import Control
from holdfast.engine.redis import wire
from holdfast.engine.redis.client import Lane
from holdfast.engine.redis.keys import PARKING
from holdfast.engine.redis.readers import view_of_reply
from holdfast.engine.redis.settling import fixed_keys
from holdfast.engine.redis.store import Store
from holdfast.errors import TransitionInvalid, UnknownJob

#: A job that changes under our eyes this often in a row is being moved by someone in a loop.
_TRIES: Final = 20


class Operators:
    """Moves single jobs: look, build what the job becomes, and write if it is still as it was seen."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def move(
        self, queue: str, job_id: str, to: State, *, actor: str, reason: str, expected: State | None = None
    ) -> State:
        for _ in range(_TRIES):
            answer = await self._try(queue, job_id, to, actor, reason, expected)
            if answer[0] == b"applied":
                return State(answer[1].decode())
            if answer[0] == b"unknown":
                raise UnknownJob(job_id)
            if answer[0] == b"illegal":
                self._store.counts.illegal_moves += 1
                raise TransitionInvalid(job_id, answer[1].decode(), to)
        raise TransitionInvalid(job_id, "changing", to)

    async def _try(
        self, queue: str, job_id: str, to: State, actor: str, reason: str, expected: State | None
    ) -> list[bytes]:
        store, keys = self._store, self._store.keys(queue)
        looked = await store.run(
            Lane.OTHER,
            "get",
            queue,
            [*keys.streams, keys.waiting, keys.retry, keys.delayed, keys.job(job_id)],
            [store.names.group, job_id],
        )
        if not looked[0]:
            return [b"unknown"]
        view = view_of_reply(queue, job_id, looked[0])
        if to not in OPERATOR_TARGETS:
            return [b"illegal", view.state.value.encode()]
        now_ms = await store.now_ms()
        failure = _failure(view, to, actor, reason)
        meta = _meta(view, to)
        body = wire.body_of_view(
            view,
            meta,
            failure=wire.failure_text(failure) if failure else "",
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
            looked[0][0].partition(b"\n")[0],
            wire.encode_body(body),
            msgspec.json.encode(_data(body, failure, to, actor, reason, now_ms)),
            options.finished_ttl_ms,
            options.result_limit,
            int(options.ledger),
            int(bool(store.names.stream_dlq)),
            dead_letter,
            PARKING,
            int(explicit),
            max(1, options.idempotency_window_ms - (now_ms - view.created_at_ms)),
            view.attempt,
            meta.retry_count,
            wire.failure_text(failure) if failure else reason,
            _lease_seen(looked[0]),
            view.tenant_id,
            msgspec.json.encode({"dlq_id": meta.dlq_id}),
        ]
        names = [*fixed_keys(keys), keys.wake, keys.job(job_id), key]
        answer: list[bytes] = await store.run(Lane.OTHER, "move", queue, names, arguments)
        return answer

    async def set_control(self, queue: str, control: Control) -> None:
        keys = self._store.keys(queue)
        await self._store.introduce(queue)
        arguments = [
            "paused",
            "1" if control.paused else "",
            "intake_paused",
            "1" if control.intake_paused else "",
            "concurrency",
            str(control.concurrency) if control.concurrency is not None else "",
        ]
        await self._store.run(Lane.OTHER, "control", queue, [keys.control, keys.notices, keys.wake], arguments)


def _lease_seen(looked: list[Any]) -> str:
    """Who held the job at which delivery when we looked; a job that is not in line has no lease."""
    return f"{looked[2].decode()} {looked[3]}" if len(looked) > 3 else " 0"


def _meta(view: JobView, to: State) -> Meta:
    meta = view.meta
    if view.state is State.SUSPENDED and to is State.QUEUED:
        return resumed(meta)
    if to is State.DLQ_PENDING:
        return msgspec.structs.replace(meta, dlq_id=new_job_ids(1)[0])
    return meta


def _failure(view: JobView, to: State, actor: str, reason: str) -> Failure | None:
    """What the record will say of the end: the job's own failure, or the operator's word."""
    if to in (State.DLQ_RECORDED, State.FAILED, State.SUSPENDED) and view.failure:
        return view.failure
    if to in FINAL or to is State.DLQ_PENDING:
        return by_operator(to, actor, reason)
    return view.failure if to is not State.QUEUED else None


def _data(body: wire.Body, failure: Failure | None, to: State, actor: str, reason: str, now_ms: int) -> dict[str, Any]:
    data: dict[str, Any] = {"actor": actor, "reason": reason}
    meta = wire.meta_from(body.meta)
    if to is State.DLQ_PENDING and failure:
        data |= wire.failure_fields(failure) | {"dlq_id": meta.dlq_id, "history": meta.history}
    elif to in (State.DLQ_RECORDED, State.FAILED):
        data["dlq_id"] = meta.dlq_id
    elif to is State.QUEUED and int(body.run_at) > now_ms:
        data["next_attempt_at_ms"] = int(body.run_at)
    return data
