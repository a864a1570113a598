"""Encoding of jobs as stream entries, records and dead letters, and decoding of queue controls.

The protocol page of the documentation describes the format. A message that holdfast writes has four fields in a fixed
order, or eight if the job carries more than its payload. That makes it cheap to read, and Redis stores the field names
once. A foreign message has the same names in any order, without the marker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from holdfast.core.job import (
    DEFAULT_TENANT,
    EMPTY_META,
    Attempt,
    Claim,
    Failure,
    JobInfo,
    Lease,
    Meta,
    Priority,
    append_attempt,
    new_job_ids,
)
from holdfast.core.states import FINAL, State
from holdfast.core.verdict import MESSAGE_MALFORMED
from holdfast.engine.port.operators import QueueControl, TenantControl
from holdfast.engine.redis.keys import STREAMS_PER_LANE

PROTOCOL_VERSION: Final = 1
MARKER: Final = b"holdfast"
#: Names and values of a message of ours: one that has nothing to say beside its payload, and any other.
_SHORT: Final = 8
_NAMES: Final = [MARKER, b"task_id", b"type", b"payload"]
_LONG: Final = 16
_MAX_ID: Final = 200
_MAX_TEXT: Final = 1_000
_MAX_COUNT: Final = 10**9

_match_head: Final = re.compile(rb"1 (?:queued|retrying) (\d{1,9}) \d{1,9} (\d{1,15})\Z").match

encode_json: Final = msgspec.json.Encoder().encode
_decode_meta: Final = msgspec.json.Decoder(Meta).decode
_decode_failure: Final = msgspec.json.Decoder(Failure).decode
_decode_any: Final = msgspec.json.Decoder().decode


class JobBody(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A job that no message carries. Lua knows the positions up to `run_at`, and wants text there; its packer
    knows no bytes and no gaps."""

    task: str
    payload: str
    tenant_id: str
    idempotency_key: str
    trace_id: str
    meta: str
    attempts: str
    retries: str
    created_at: str
    stream_index: str
    #: Not before this instant, when it goes in line; "0" is at once.
    run_at: str = "0"
    result: str = ""
    failure: str = ""
    finished_at_ms: int = 0
    #: Who ended it and since when; `succeeded` jobs make their last attempt from these.
    worker: str = ""
    claimed_at_ms: int = 0
    #: Deliveries of the message so far; in the pending list, those that earlier attempts used up.
    deliveries: int = 0


encode_record: Final = msgspec.msgpack.Encoder().encode
decode_record: Final = msgspec.msgpack.Decoder(JobBody).decode


class MalformedMessage(Exception):
    """A foreign message that cannot become a job; says why."""


def encode_meta(meta: Meta) -> str:
    """A job's `Meta` as it travels; empty for most jobs."""
    return "" if meta is EMPTY_META or meta == EMPTY_META else encode_json(meta).decode()


def decode_meta(text: bytes | str) -> Meta:
    """The other way."""
    return _decode_meta(text) if text else EMPTY_META


def parse_entry(entry: Sequence[Any], line: int, queue: str, worker: str, deliveries: int, now_ms: int) -> Claim:
    """A message of ours as a claim. Raises `Malformed` for one that only pretends to be."""
    fields = entry[1]
    try:
        attempts, created_at = _match_head(fields[1]).groups()  # type: ignore[union-attr]
        job_id = fields[3].decode()
        lease = Lease(queue, job_id, f"{line}:{entry[0].decode()}", deliveries, worker)
        tenant_id, key, trace_id, meta = DEFAULT_TENANT, job_id, "", EMPTY_META
        if len(fields) == _LONG:
            tenant_id, key, trace_id = fields[9].decode(), fields[11].decode(), fields[13].decode()
            meta = decode_meta(fields[15])
        return Claim(
            lease,
            fields[5].decode(),
            fields[7],
            tenant_id,
            key,
            trace_id,
            int(attempts) + deliveries,
            int(created_at),
            now_ms,
            meta,
        )
    except (ValueError, AttributeError, msgspec.MsgspecError) as exc:
        raise MalformedMessage(f"the message has holdfast's marker, but not its fields: {exc}") from exc


def is_native(fields: Sequence[Any]) -> bool:
    """Whether holdfast wrote this message: its own fields in its own order."""
    return len(fields) in (_SHORT, _LONG) and fields[0:8:2] == _NAMES


def parse_foreign(entry: Sequence[Any], line: int, queue: str, worker: str, deliveries: int) -> Claim:
    """A message by another program as a claim. Raises `Malformed`."""
    fields = as_dict(entry[1])
    if MARKER in fields:
        raise MalformedMessage("the message has holdfast's marker, but not its fields")
    place = f"{line}:{entry[0].decode()}"
    job_id = usable_id(fields.get(b"task_id"))
    if job_id is None:
        raise MalformedMessage("the message has no usable task_id (1 to 200 printable characters without spaces)")
    task, payload = _text(fields, b"type"), fields.get(b"payload")
    if not task or payload is None:
        raise MalformedMessage(f"the message lacks {'type' if not task else 'payload'}")
    try:
        value = _decode_any(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedMessage(f"the payload is no JSON: {exc}") from exc
    if not isinstance(value, dict | list):
        raise MalformedMessage(
            "the payload is neither a JSON object of keyword arguments nor an array of positional ones"
        )
    return Claim(
        Lease(queue, job_id, place, deliveries, worker),
        task,
        payload,
        _text(fields, b"tenant_id") or DEFAULT_TENANT,
        _text(fields, b"idempotency_key") or job_id,
        _text(fields, b"trace_id"),
        deliveries,
        int(entry[0].split(b"-")[0]),
        0,
        _foreign_meta(fields, line),
    )


def check_size(payload: bytes, limit: int) -> None:
    """Raises `Malformed` for a payload that no caller could have submitted."""
    if len(payload) > limit:
        raise MalformedMessage(f"the payload has {len(payload):,} bytes, the limit is {limit:,}")


def parse_adopted(entry: Sequence[Any], line: int, queue: str, worker: str, deliveries: int, now_ms: int) -> Claim:
    """An adopted foreign message, delivered again."""
    return msgspec.structs.replace(parse_foreign(entry, line, queue, worker, deliveries), claimed_at_ms=now_ms)


def _foreign_meta(fields: Mapping[bytes, bytes], line: int) -> Meta:
    max_retries, context = fields.get(b"max_retries"), fields.get(b"context")
    try:
        retries = int(max_retries) if max_retries else None
        if retries is not None and not 0 <= retries <= _MAX_COUNT:
            raise ValueError(f"it is not between 0 and {_MAX_COUNT:,}")
    except ValueError as exc:
        raise MalformedMessage(f"max_retries is no count: {exc}") from exc
    values = None
    if context:
        try:
            values = msgspec.json.decode(context, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise MalformedMessage(f"context is no JSON object: {exc}") from exc
    priority = priority_of(line)
    if retries is None and values is None and priority is Priority.NORMAL:
        return EMPTY_META
    return Meta(priority=priority, max_retries=retries, context=values)


def priority_of(line: int) -> Priority:
    """What the line says of a message that says nothing itself; of one that was taken from its line, nothing."""
    place = line % STREAMS_PER_LANE
    return Priority(place) if place < len(Priority) else Priority.NORMAL


def malformed_record(
    fields: Mapping[bytes, bytes], entry_id: bytes, line: int, failure: Failure, dlq_id: str
) -> JobBody:
    """The record of a foreign message that cannot become a job: all of its raw fields, as text."""
    raw = {printable(name): printable(value) for name, value in fields.items()}
    return JobBody(
        task=printable(fields.get(b"type", b""))[:_MAX_ID] or "unknown",
        payload=msgspec.json.encode(raw).decode(),
        tenant_id=printable(fields.get(b"tenant_id", b""))[:_MAX_ID] or DEFAULT_TENANT,
        idempotency_key="",
        trace_id=printable(fields.get(b"trace_id", b""))[:_MAX_ID],
        meta=encode_meta(Meta(dlq_id=dlq_id)),
        attempts="0",
        retries="0",
        created_at=entry_id.split(b"-")[0].decode(),
        stream_index=str(int(priority_of(line))),
        failure=encode_failure(failure),
        finished_at_ms=int(entry_id.split(b"-")[0]),
    )


pack: Final = msgspec.msgpack.Encoder().encode


def encode_failure(failure: Failure) -> str:
    """A failure as it travels."""
    return encode_json(failure).decode()


def failure_fields(failure: Failure) -> dict[str, Any]:
    """A failure among the data of an event."""
    fields: dict[str, Any] = msgspec.to_builtins(failure)
    return fields


def encode_history(meta: Meta) -> str:
    """The attempts so far, as a dead letter tells them."""
    return encode_json(meta.history).decode()


def malformed_failure(reason: str) -> Failure:
    """The failure that such a message ends with."""
    return Failure(MESSAGE_MALFORMED, reason)


def usable_id(value: bytes | None) -> str | None:
    """A foreign task id that can name a job."""
    if value is None:
        return None
    text = printable(value)
    if not 0 < len(text) <= _MAX_ID or "\ufffd" in text or any(c.isspace() or not c.isprintable() for c in text):
        return None
    return text


def generated_id() -> str:
    """An id for a message that brings none."""
    return new_job_ids(1)[0]


def as_dict(fields: Sequence[bytes]) -> dict[bytes, bytes]:
    """Field names and values of a stream entry."""
    return dict(zip(fields[::2], fields[1::2], strict=True))


def printable(value: bytes) -> str:
    """Bytes of unknown origin as text."""
    return value.decode("utf-8", "replace")


def _text(fields: Mapping[bytes, bytes], name: bytes) -> str:
    value = fields.get(name, b"")
    if len(value) > _MAX_TEXT:
        raise MalformedMessage(f"{name.decode()} has {len(value):,} bytes, the limit is {_MAX_TEXT:,}")
    try:
        return value.decode()
    except UnicodeDecodeError as exc:
        raise MalformedMessage(f"{name.decode()} is no UTF-8: {exc}") from exc


def dead_letter_fields(job_id: str, body: JobBody, failure: Failure, dlq_id: str) -> list[str]:
    """What `stream:dlq` says of a job (requirement D2); the script adds `failed_at`."""
    meta = decode_meta(body.meta)
    fields = {
        "task_id": job_id,
        "type": body.task,
        "payload": body.payload,
        "error_code": failure.code,
        "error": f"{failure.type}: {failure.message}" if failure.type else failure.message,
        "stack": failure.stack,
        "retry_count": body.retries,
        "attempt": body.attempts,
        "history": encode_history(meta),
        "tenant_id": body.tenant_id,
        "trace_id": body.trace_id,
        "idempotency_key": body.idempotency_key,
        "dlq_id": dlq_id,
    }
    return [part for pair in fields.items() for part in pair]


def record_from_claim(claim: Claim, meta: Meta, attempts: int, **more: Any) -> JobBody:
    """A claimed job as a body, for when it leaves the line."""
    return JobBody(
        task=claim.task,
        payload=printable(claim.payload),
        tenant_id=claim.tenant_id,
        idempotency_key=claim.idempotency_key,
        trace_id=claim.trace_id,
        meta=encode_meta(meta),
        attempts=str(attempts),
        retries=str(meta.retry_count),
        created_at=str(claim.created_at_ms),
        stream_index=str(int(meta.priority)),
        **more,
    )


def info_from_record(queue: str, job_id: str, state: State, body: JobBody, due_ms: int) -> JobInfo:
    """A job that no message carries, as a reader sees it."""
    meta = decode_meta(body.meta)
    if body.run_at != "0":
        meta = msgspec.structs.replace(meta, run_at_ms=int(body.run_at))
    if state is State.SUCCEEDED:
        last = Attempt(int(body.attempts), body.worker, body.claimed_at_ms, body.finished_at_ms, state.value)
        lost = meta.lost_leases + body.deliveries - 1
        meta = msgspec.structs.replace(meta, lost_leases=lost, history=append_attempt(meta.history, last))
    return JobInfo(
        job_id=job_id,
        task=body.task,
        queue=queue,
        tenant_id=body.tenant_id,
        state=state,
        attempt=int(body.attempts),
        payload=body.payload.encode(),
        idempotency_key=body.idempotency_key,
        trace_id=body.trace_id,
        meta=meta,
        created_at_ms=int(body.created_at),
        result=body.result.encode() if state is State.SUCCEEDED else None,
        failure=_decode_failure(body.failure) if body.failure else None,
        next_attempt_at_ms=due_ms,
        finished_at_ms=body.finished_at_ms if state in FINAL else 0,
    )


def record_from_info(view: JobInfo, meta: Meta, **more: Any) -> JobBody:
    """The other way, for an operator's move. A job that had a time keeps it."""
    run_at_ms = view.next_attempt_at_ms if view.state is State.QUEUED else meta.run_at_ms
    meta = msgspec.structs.replace(meta, run_at_ms=0)
    return JobBody(
        task=view.task,
        payload=printable(view.payload),
        tenant_id=view.tenant_id,
        idempotency_key=view.idempotency_key,
        trace_id=view.trace_id,
        meta=encode_meta(meta),
        attempts=str(view.attempt),
        retries=str(meta.retry_count),
        created_at=str(view.created_at_ms),
        stream_index=str(int(meta.priority)),
        run_at=str(run_at_ms),
        **more,
    )


_decode_tenants: Final = msgspec.json.Decoder(dict[str, TenantControl]).decode


def decode_control(fields: Sequence[bytes]) -> QueueControl:
    """A queue's controls as Redis keeps them."""
    values = as_dict(fields)

    def count(name: bytes) -> int | None:
        value = values.get(name)
        return int(value) if value else None

    return QueueControl(
        paused=values.get(b"paused") == b"1",
        intake_paused=values.get(b"intake_paused") == b"1",
        concurrency=count(b"concurrency"),
        intake_limit=count(b"intake_limit"),
        backlog_alert=count(b"backlog_alert"),
        tenants=_decode_tenants(values.get(b"tenants") or b"{}"),
    )
