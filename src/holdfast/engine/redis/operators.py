"""move and expedite: an operator's hand on one job."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from holdfast.core.job import Consent, Failure, JobView, Meta, new_job_ids
from holdfast.core.states import EXPEDITED_EVENT, FINAL, OPERATOR_TARGETS, State, chosen_event, is_legal
from holdfast.core.verdict import APPROVAL_EXPIRED, APPROVAL_REJECTED, answered, by_operator, resumed, waits_for
from holdfast.engine.redis import wire
from holdfast.engine.redis.client import Purpose
from holdfast.engine.redis.controls import Hand
from holdfast.engine.redis.keys import PARKING
from holdfast.engine.redis.readers import view_of_reply
from holdfast.engine.redis.settling import fixed_keys
from holdfast.engine.redis.store import Store
from holdfast.errors import TransitionInvalid, UnknownJob

#: A job that changes under our eyes this often in a row is being moved by someone in a loop.
_TRIES: Final = 20
#: The failure of a job that ended without people's yes.
_CODES: Final = {"approval.rejected": APPROVAL_REJECTED, "approval.expired": APPROVAL_EXPIRED}


class Operators:
    """Moves single jobs: look, build what the job becomes, and write if it is still as it was seen."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def move(
        self,
        queue: str,
        job_id: str,
        to: State,
        hand: Hand,
        expected: State | None,
        event: str,
        consent: Consent | None,
        approval_id: str,
    ) -> State:
        for _ in range(_TRIES):
            answer = await self._try(queue, job_id, to, hand, expected, event, consent, approval_id)
            if answer[0] == b"applied":
                self._store.counts.given_up += to is State.DLQ_PENDING
                return State(answer[1].decode())
            if answer[0] == b"unknown":
                raise UnknownJob(job_id)
            if answer[0] == b"illegal":
                self._store.counts.illegal_moves += 1
                raise TransitionInvalid(job_id, answer[1].decode(), to)
        raise TransitionInvalid(job_id, "changing", to)

    async def expedite(self, queue: str, job_id: str, hand: Hand) -> None:
        store, keys = self._store, self._store.keys(queue)
        for _ in range(_TRIES):
            looked = await self._look(queue, job_id)
            if not looked:
                raise UnknownJob(job_id)
            view = view_of_reply(queue, job_id, looked)
            now_ms = await store.now_ms(queue)
            before = {"state": view.state.value, "next_attempt_at_ms": view.next_attempt_at_ms}
            log = hand.log(before, before | {"next_attempt_at_ms": now_ms}, "job", job_id)
            told = {"actor": hand.actor, "reason": hand.reason, "next_attempt_at_ms": now_ms}
            arguments = [store.nonce(), store.feed_limit, job_id, looked[0].partition(b"\n")[0]]
            arguments += (view.attempt, view.meta.retry_count, EXPEDITED_EVENT)
            arguments.append(msgspec.json.encode(told))
            arguments += (hand.audit, msgspec.json.encode(log), view.tenant_id)
            names = [keys.job(job_id), keys.delayed, keys.retry, keys.waiting, keys.feed, keys.control, keys.notices]
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
        names = [*keys.streams, keys.waiting, keys.retry, keys.delayed, keys.waiters, keys.job(job_id)]
        arguments, lanes = [store.names.group, 0, job_id], store.lanes(queue).all()
        return (await store.run_on_lines(Purpose.OTHER, "get", queue, names, arguments, lanes))[0]

    async def _try(
        self,
        queue: str,
        job_id: str,
        to: State,
        hand: Hand,
        expected: State | None,
        event: str,
        consent: Consent | None,
        approval_id: str,
    ) -> list[bytes]:
        store, keys = self._store, self._store.keys(queue)
        looked = await self._look(queue, job_id)
        if not looked:
            return [b"unknown"]
        view = view_of_reply(queue, job_id, looked)
        # The script moves nothing if the record has changed since this look, and each request for approval changes it.
        if to not in OPERATOR_TARGETS or not waits_for(view.state, view.meta, approval_id):
            return [b"illegal", view.state.value.encode()]
        if expected in (None, view.state) and is_legal(view.state, to):
            event = chosen_event(view.state, to, event)
        now_ms = await store.now_ms(queue)
        failure = _failure(view, to, hand, event)
        meta = _meta(view, to, consent)
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
            looked[0].partition(b"\n")[0],
            wire.encode_body(body),
            msgspec.json.encode(_data(body, failure, to, hand, consent, now_ms)),
            options.finished_ttl_ms,
            options.result_limit,
            int(options.ledger),
            int(bool(store.names.stream_dlq)),
            dead_letter,
            PARKING,
            int(explicit),
            max(1, (meta.key_window_ms or options.idempotency_window_ms) - (now_ms - view.created_at_ms)),
            view.attempt,
            meta.retry_count,
            wire.failure_text(failure) if failure else hand.reason,
            _lease_seen(looked),
            view.tenant_id,
            msgspec.json.encode({"dlq_id": meta.dlq_id}),
            event,
            hand.audit,
            msgspec.json.encode(hand.log(view.state.value, to.value, "job", job_id)) if hand.audit else b"",
        ]
        names = [*fixed_keys(keys), keys.job(job_id), key]
        lanes = store.lanes(queue).all()
        answer: list[bytes] = await store.run_on_lines(Purpose.OTHER, "move", queue, names, arguments, lanes)
        return answer


def _lease_seen(looked: list[Any]) -> str:
    """Who held the job at which delivery when we looked; a job that is not in line has no lease."""
    return f"{looked[2].decode()} {looked[3]}" if len(looked) > 3 else " 0"


def _meta(view: JobView, to: State, consent: Consent | None) -> Meta:
    meta = view.meta
    if view.state is State.SUSPENDED and to is State.QUEUED:
        return resumed(meta)
    if view.state is State.WAITING_APPROVAL:
        return answered(meta, consent if to is State.QUEUED else None)
    if to is State.DLQ_PENDING:
        return msgspec.structs.replace(meta, dlq_id=new_job_ids(1)[0])
    return meta


def _failure(view: JobView, to: State, hand: Hand, event: str) -> Failure | None:
    """What the record will say of the end: the job's own failure, or the operator's word."""
    if to in (State.DLQ_RECORDED, State.FAILED, State.SUSPENDED) and view.failure:
        return view.failure
    if to in FINAL or to is State.DLQ_PENDING:
        failure = by_operator(to, hand.actor, hand.reason)
        code = _CODES.get(event)
        return msgspec.structs.replace(failure, code=code) if code else failure
    return view.failure if to is not State.QUEUED else None


def _data(
    body: wire.Body, failure: Failure | None, to: State, hand: Hand, consent: Consent | None, now_ms: int
) -> dict[str, Any]:
    data: dict[str, Any] = {"actor": hand.actor, "reason": hand.reason}
    meta = wire.meta_from(body.meta)
    if to is State.DLQ_PENDING and failure:
        data |= wire.failure_fields(failure) | {"dlq_id": meta.dlq_id, "history": meta.history}
    elif to in (State.DLQ_RECORDED, State.FAILED):
        data["dlq_id"] = meta.dlq_id
    elif to is State.QUEUED and int(body.run_at) > now_ms:
        data["next_attempt_at_ms"] = int(body.run_at)
    if to is State.QUEUED and consent is not None:
        data["consent"] = consent
    return data
