"""Rows of `jobs` and `job_events` in PostgreSQL's binary COPY format.

A job has a row and three events or more, so these are the hottest loops of the projector. A driver encodes value by
value. Here a job's names, an event's type and states, and an instant are encoded once and joined, at a quarter of the
cost. A value that cannot be encoded raises `ValueError` or `OverflowError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import lru_cache
from struct import Struct, error
from typing import Final

from holdfast.core.states import State
from holdfast.ledger.fold import JobDraft
from holdfast.ledger.fold_events import data_of, envelope_of
from holdfast.ledger.fold_rows import EVENT_COLUMNS, JOB_COLUMNS

#: Signature, flags, length of the header's extension.
_HEAD: Final = b"PGCOPY\n\xff\r\n\x00" + bytes(8)
_TAIL: Final = b"\xff\xff"
_NULL: Final = b"\xff\xff\xff\xff"
_JOB_FIELDS: Final = len(JOB_COLUMNS).to_bytes(2)
_EVENT_FIELDS: Final = len(EVENT_COLUMNS).to_bytes(2)
#: Jobs whose events are sent together: while the server reads them, the next ones are encoded.
_CHUNK: Final = 500

_length: Final = Struct("!i").pack
_int2: Final = Struct("!ih").pack
_int4: Final = Struct("!ii").pack
_int8: Final = Struct("!iq").pack

#: PostgreSQL counts microseconds from here …
_EPOCH_MS: Final = 946_684_800_000
#: … and Python's calendar ends here.
_LAST_MS: Final = 253_402_300_799_000


def job_rows(drafts: Iterable[JobDraft], queue: str) -> bytes:
    """The rows of new jobs, in the order of `JOB_COLUMNS`."""
    parts: list[bytes] = [_HEAD]
    add = parts.append
    in_queue = _text(queue)
    for draft in drafts:
        job_type, priority, key, trace_id, payload, context, meta, webhook = envelope_of(draft)
        job_id = _text(draft.job_id)
        add(_JOB_FIELDS)
        add(_name(draft.tenant_id))
        add(job_id)
        add(in_queue)
        add(_counts(draft.state or "", draft.attempt, draft.retry_count, len(draft.events)))
        add(_NULL if draft.worker is None else _name(draft.worker))
        for text in (draft.error_code, draft.last_error, draft.error_message, draft.result):
            add(_NULL if text is None else _text(text))
        add(_instant_or_never(draft.run_at_ms))
        add(_instant_or_never(draft.next_retry_at_ms))
        add(_NULL if draft.dlq_id is None else _text(draft.dlq_id))
        add(_instant_or_never(draft.events[0].at_ms))
        add(_instant_or_never(draft.at_ms))
        add(_instant_or_never(draft.finished_at_ms))
        add(_name(job_type))
        add(_small(priority))
        add(job_id if key == draft.job_id else _text(key))
        add(_text(trace_id))
        add(_text(payload))
        for text in (context, meta, webhook):
            add(_NULL if text is None else _text(text))
    add(_TAIL)
    return b"".join(parts)


async def as_stream(rows: bytes) -> AsyncIterator[bytes]:
    """The rows as the iterator that the driver expects."""
    yield rows


async def event_rows(drafts: Sequence[JobDraft], queue: str) -> AsyncIterator[bytes]:
    """The rows of all events, numbered from each draft's `seq` + 1, in the order of `EVENT_COLUMNS`."""
    yield _HEAD
    in_queue = _text(queue)
    for start in range(0, len(drafts), _CHUNK):
        yield _encode_events(drafts[start : start + _CHUNK], in_queue)
        await asyncio.sleep(0)
    yield _TAIL


def _encode_events(drafts: Sequence[JobDraft], in_queue: bytes) -> bytes:
    parts: list[bytes] = []
    add = parts.append
    for draft in drafts:
        job_id = draft.job_id.encode()
        name = b"".join((_EVENT_FIELDS, _name(draft.tenant_id), _length(len(job_id)), job_id, in_queue))
        for seq, event in enumerate(draft.events, draft.seq + 1):
            add(name)
            add(_number(seq))
            add(_kind(event.type, event.from_state, event.to_state))
            add(_number(event.attempt))
            add(_number(event.retry_count))
            add(_name(event.worker) if event.worker else _NULL)
            add(_text(event.message) if event.message else _NULL)
            data = data_of(event) if event.data else None
            add(_NULL if data is None else _text(data))
            add(_instant(event.at_ms))
    return b"".join(parts)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return _length(len(encoded)) + encoded


@lru_cache(maxsize=1_000)
def _name(value: str) -> bytes:
    return _text(value)


@lru_cache(maxsize=1_000)
def _kind(event_type: str, from_state: State | None, to_state: State | None) -> bytes:
    states = (_NULL if state is None else _text(state) for state in (from_state, to_state))
    return b"".join((_text(event_type), *states))


@lru_cache(maxsize=1_000)
def _counts(state: str, attempt: int, retry_count: int, last_seq: int) -> bytes:
    return b"".join((_text(state), _number(attempt), _number(retry_count), _number(last_seq)))


@lru_cache(maxsize=1_000)
def _number(value: int) -> bytes:
    return _pack(_int4, 4, value)


@lru_cache(maxsize=100)
def _small(value: int) -> bytes:
    return _pack(_int2, 2, value)


def _pack(pack: Callable[[int, int], bytes], size: int, value: int) -> bytes:
    try:
        return pack(size, value)
    except error as exc:
        raise OverflowError(value) from exc


def _instant_or_never(ms: int) -> bytes:
    return _instant(ms) if ms > 0 else _NULL


@lru_cache(maxsize=10_000)
def _instant(ms: int) -> bytes:
    return _int8(8, (min(ms, _LAST_MS) - _EPOCH_MS) * 1_000)
