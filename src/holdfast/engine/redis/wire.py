"""Encoding of jobs as stream entries, records and dead letters.

The protocol page of the documentation describes the format. A message that holdfast writes has four fields in a fixed
order, or eight if the job carries more than its payload. That makes it cheap to read, and Redis stores the field names
once. The name of the first field is the queue's *marker*, a secret; scripts check it and return `MARKER` in its place,
or `UNVERIFIED`. A foreign message has the other names in any order.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from holdfast.core.job import (
    DEFAULT_TENANT,
    EMPTY_META,
    Attempt,
    Claim,
    Count,
    Failure,
    InstantMs,
    JobInfo,
    Lease,
    Meta,
    Priority,
    append_attempt,
    decode_meta,
    new_job_ids,
)
from holdfast.core.states import FINAL, State
from holdfast.core.text import MESSAGE_DEPTH, too_deep
from holdfast.core.verdict import MESSAGE_MALFORMED
from holdfast.engine.redis.keys import STREAMS_PER_LANE

PROTOCOL_VERSION: Final = 1
MARKER: Final = b"holdfast"
UNVERIFIED: Final = b"holdfast?"
#: Random bytes in a marker.
_MARKER_BYTES: Final = 16
#: Names and values in a native message: short if the job has only a payload, else long.
_SHORT: Final = 8
_NAMES: Final = [MARKER, b"task_id", b"type", b"payload"]
_LONG: Final = 16
_MAX_ID: Final = 200
_MAX_TEXT: Final = 1_000
_MAX_COUNT: Final = 10**9
_LAST_MS: Final = 10.0**15
#: `Meta` contains values that may be nested to `MESSAGE_DEPTH`.
_META_DEPTH: Final = MESSAGE_DEPTH + 20

_match_head: Final = re.compile(rb"1 (?:queued|retrying) (\d{1,9}) \d{1,9} (\d{1,15})\Z").match

encode_json: Final = msgspec.json.Encoder().encode
_decode_failure: Final = msgspec.json.Decoder(Failure).decode
_decode_any: Final = msgspec.json.Decoder().decode


#: Numbers in a record as text, checked when it is read: other programs can write records.
CountText = Annotated[str, msgspec.Meta(pattern=r"\A-?[0-9]{1,10}\Z")]
InstantText = Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,15}\Z")]


class JobBody(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The record of a job without a message.

    Lua scripts use the fields up to `run_at` by position and need text in them. Their packer cannot write bytes or nil.
    """

    task: str
    payload: str
    tenant_id: str
    idempotency_key: str
    trace_id: str
    meta: str
    attempts: CountText
    retries: CountText
    created_at: InstantText
    stream_index: CountText
    #: When the job is due once it is queued; "0": immediately.
    run_at: InstantText = "0"
    result: str = ""
    failure: str = ""
    finished_at_ms: InstantMs = 0
    #: Worker and start of the last attempt; the history of a `succeeded` job is completed from these.
    worker: str = ""
    claimed_at_ms: InstantMs = 0
    #: Delivery count of the message; for a retry in the pending list, deliveries that earlier attempts used up.
    deliveries: Count = 0


encode_record: Final = msgspec.msgpack.Encoder().encode
decode_record: Final = msgspec.msgpack.Decoder(JobBody).decode


def read_record(packed: bytes) -> tuple[JobBody, Meta] | None:
    """The body of a record; None if it cannot be read."""
    try:
        body = decode_record(packed)
        if too_deep(body.meta.encode(), _META_DEPTH):
            return None
        return body, decode_meta(body.meta)
    except (ValueError, RecursionError):
        return None


class MalformedMessage(Exception):
    """A foreign message that cannot become a job, with the reason."""


def new_marker() -> str:
    """Return the name of the first field of messages that holdfast writes: a secret of the queue."""
    return f"{MARKER.decode()}:{secrets.token_urlsafe(_MARKER_BYTES)}"


def encode_meta(meta: Meta) -> str:
    """Encode a job's `Meta` as JSON; empty for most jobs."""
    return "" if meta is EMPTY_META or meta == EMPTY_META else encode_json(meta).decode()


def parse_entry(
    entry: Sequence[Any], stream_index: int, queue: str, worker: str, deliveries: int, now_ms: int
) -> Claim:
    """Decode a native message as a claim. Raises `MalformedMessage` for one that holdfast did not write."""
    fields = entry[1]
    try:
        attempts, created_at = _match_head(fields[1]).groups()  # type: ignore[union-attr]
        job_id = fields[3].decode()
        lease = Lease(queue, job_id, f"{stream_index}:{entry[0].decode()}", deliveries, worker)
        tenant_id, key, trace_id, meta = DEFAULT_TENANT, job_id, "", EMPTY_META
        if len(fields) == _LONG:
            tenant_id, key, trace_id = fields[9].decode(), fields[11].decode(), fields[13].decode()
            _check_depth(fields[15], "meta", _META_DEPTH)
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
    except (ValueError, AttributeError, RecursionError, msgspec.MsgspecError) as exc:
        raise MalformedMessage(f"the message has holdfast's marker but invalid fields: {exc}") from exc


def is_native(fields: Sequence[Any]) -> bool:
    """Whether holdfast wrote this message: a script verified its marker, and its fields are in their order."""
    return len(fields) in (_SHORT, _LONG) and fields[0:8:2] == _NAMES


def may_be_native(fields: Sequence[Any]) -> bool:
    """Whether this is a message of holdfast with another marker, or of a program that pretends to be holdfast."""
    return fields[0] == UNVERIFIED and len(fields) in (_SHORT, _LONG) and fields[2:8:2] == _NAMES[1:]


def parse_foreign(entry: Sequence[Any], stream_index: int, queue: str, worker: str, deliveries: int) -> Claim:
    """Decode a foreign message as a claim. Ignores what only holdfast may write. Raises `MalformedMessage`."""
    fields = as_dict(entry[1])
    if entry[1][0] == MARKER:
        raise MalformedMessage("the message has holdfast's marker but not its fields")
    position = f"{stream_index}:{entry[0].decode()}"
    job_id = usable_id(fields.get(b"task_id"))
    if job_id is None:
        raise MalformedMessage("the message has no usable task_id (1 to 200 printable characters without spaces)")
    task, payload = _text(fields, b"type"), fields.get(b"payload")
    if not task or payload is None:
        raise MalformedMessage(f"the message lacks {'type' if not task else 'payload'}")
    _check_depth(payload, "the payload")
    try:
        value = _decode_any(payload)
    except (ValueError, RecursionError) as exc:
        raise MalformedMessage(f"the payload is not JSON: {exc}") from exc
    if not isinstance(value, dict | list):
        raise MalformedMessage(
            "the payload is neither a JSON object of keyword arguments nor an array of positional ones"
        )
    return Claim(
        Lease(queue, job_id, position, deliveries, worker),
        task,
        payload,
        _text(fields, b"tenant_id") or DEFAULT_TENANT,
        _text(fields, b"idempotency_key") or job_id,
        _text(fields, b"trace_id"),
        deliveries,
        int(entry[0].split(b"-")[0]),
        0,
        _foreign_meta(fields, stream_index),
    )


def _check_depth(encoded: bytes, what: str, levels: int = MESSAGE_DEPTH) -> None:
    """Raise `MalformedMessage` for nesting that a later step could not process.

    The recursion limit applies to the whole stack, so that one process can read what another cannot.
    """
    if too_deep(encoded, levels):
        raise MalformedMessage(f"{what} is nested deeper than {levels} levels")


def check_size(payload: bytes, limit: int) -> None:
    """Raise `MalformedMessage` for a payload above the limit of submissions."""
    if len(payload) > limit:
        raise MalformedMessage(f"the payload has {len(payload):,} bytes, the limit is {limit:,}")


def parse_adopted(
    entry: Sequence[Any], stream_index: int, queue: str, worker: str, deliveries: int, now_ms: int
) -> Claim:
    """Decode a foreign message that was adopted before and is delivered again."""
    return msgspec.structs.replace(parse_foreign(entry, stream_index, queue, worker, deliveries), claimed_at_ms=now_ms)


def _foreign_meta(fields: Mapping[bytes, bytes], stream_index: int) -> Meta:
    max_retries, context = fields.get(b"max_retries"), fields.get(b"context")
    try:
        retries = int(max_retries) if max_retries else None
        if retries is not None and not 0 <= retries <= _MAX_COUNT:
            raise ValueError(f"it is not between 0 and {_MAX_COUNT:,}")
    except ValueError as exc:
        raise MalformedMessage(f"max_retries is not a valid count: {exc}") from exc
    values = None
    if context:
        _check_depth(context, "context")
        try:
            values = msgspec.json.decode(context, type=dict[str, Any])
        except (ValueError, RecursionError) as exc:
            raise MalformedMessage(f"context is not a JSON object: {exc}") from exc
    priority = priority_of(stream_index)
    if retries is None and values is None and priority is Priority.NORMAL:
        return EMPTY_META
    return Meta(priority=priority, max_retries=retries, context=values)


def priority_of(stream_index: int) -> Priority:
    """The priority of a foreign message, given by its stream.

    The stream of jobs claimed by id gives normal.
    """
    offset = stream_index % STREAMS_PER_LANE
    return Priority(offset) if offset < len(Priority) else Priority.NORMAL


def malformed_record(
    fields: Mapping[bytes, bytes], entry_id: bytes, stream_index: int, failure: Failure, dlq_id: str
) -> JobBody:
    """The record of a malformed message, with all its raw fields as text."""
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
        stream_index=str(int(priority_of(stream_index))),
        failure=encode_failure(failure),
        finished_at_ms=int(entry_id.split(b"-")[0]),
    )


pack: Final = msgspec.msgpack.Encoder().encode


def encode_failure(failure: Failure) -> str:
    """Encode a failure as JSON."""
    return encode_json(failure).decode()


def failure_fields(failure: Failure) -> dict[str, Any]:
    """A failure as data of an event."""
    fields: dict[str, Any] = msgspec.to_builtins(failure)
    return fields


def encode_history(meta: Meta) -> str:
    """Encode the attempts so far as JSON, for a dead letter."""
    return encode_json(meta.history).decode()


def malformed_failure(reason: str) -> Failure:
    """The failure of a malformed message."""
    return Failure(MESSAGE_MALFORMED, reason)


def usable_id(value: bytes | None) -> str | None:
    """Return a foreign task id if it is a valid job id, else None."""
    if value is None:
        return None
    text = printable(value)
    if not 0 < len(text) <= _MAX_ID or "\ufffd" in text or any(c.isspace() or not c.isprintable() for c in text):
        return None
    return text


def generated_id() -> str:
    """Return an id for a message without a usable one."""
    return new_job_ids(1)[0]


def as_dict(fields: Sequence[bytes]) -> dict[bytes, bytes]:
    """Return the fields of a stream entry by name."""
    return dict(zip(fields[::2], fields[1::2], strict=True))


def printable(value: bytes) -> str:
    """Decode bytes that may not be UTF-8."""
    return value.decode("utf-8", "replace")


def instant(text: bytes) -> int:
    """The instant in a score, in milliseconds; the nearest one if another program has written any other number."""
    try:
        return int(min(max(float(text or 0), 0.0), _LAST_MS))
    except ValueError:
        return 0


def _text(fields: Mapping[bytes, bytes], name: bytes) -> str:
    value = fields.get(name, b"")
    if len(value) > _MAX_TEXT:
        raise MalformedMessage(f"{name.decode()} has {len(value):,} bytes, the limit is {_MAX_TEXT:,}")
    try:
        return value.decode()
    except UnicodeDecodeError as exc:
        raise MalformedMessage(f"{name.decode()} is not UTF-8: {exc}") from exc


def dead_letter_fields(job_id: str, body: JobBody, failure: Failure, dlq_id: str) -> list[str]:
    """The fields of a dead letter in `stream:dlq` (requirement D2); the script adds `failed_at`."""
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
    """The record of a claimed job, for when its message is removed."""
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


def info_from_record(queue: str, job_id: str, state: State, packed: bytes, due_ms: int) -> JobInfo | None:
    """Decode the record of a job without a message; None if it cannot be read."""
    record = read_record(packed)
    if record is None:
        return None
    body, meta = record
    try:
        failure = _decode_failure(body.failure) if body.failure else None
    except (ValueError, RecursionError):
        return None
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
        failure=failure,
        next_attempt_at_ms=due_ms,
        finished_at_ms=body.finished_at_ms if state in FINAL else 0,
    )


def record_from_info(view: JobInfo, meta: Meta, **more: Any) -> JobBody:
    """The record of a job, for an operator's move or a restore. A due time is kept."""
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


def record_from_ledger(job: JobInfo) -> JobBody:
    """The record of a job that was rebuilt from the ledger, open or ended."""
    meta, more = job.meta, {}
    if job.failure:
        more["failure"] = encode_failure(job.failure)
    if job.state is State.SUCCEEDED and meta.history:
        # The last attempt of a succeeded job is in separate fields.
        last, result = meta.history[-1], printable(job.result or b"null")
        meta = msgspec.structs.replace(meta, history=meta.history[:-1])
        times = {"claimed_at_ms": last.started_at_ms, "finished_at_ms": last.finished_at_ms, "deliveries": 1}
        return msgspec.structs.replace(
            record_from_info(job, meta), result=result, payload="", worker=last.worker, **times
        )
    return record_from_info(job, meta, finished_at_ms=job.finished_at_ms, **more)
