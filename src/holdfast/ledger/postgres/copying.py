"""Rows of `job_events` in PostgreSQL's binary COPY format, built from what most of them share.

A job has three events or more, so this is the hottest loop of the projector. A driver encodes value by value; here the
names of a job, the words of an event and an instant are encoded once and put together, which costs a quarter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import lru_cache
from struct import Struct
from typing import Final

from holdfast.core.states import State
from holdfast.ledger.folding import Draft, data_of
from holdfast.ledger.rows import EVENT_COLUMNS

#: Signature, flags, length of the header's extension.
_HEAD: Final = b"PGCOPY\n\xff\r\n\x00" + bytes(8)
_TAIL: Final = b"\xff\xff"
_NULL: Final = b"\xff\xff\xff\xff"
_FIELDS: Final = len(EVENT_COLUMNS).to_bytes(2)
#: Jobs whose events go out together: while the server takes them, the next ones are encoded.
_CHUNK: Final = 500

_length: Final = Struct("!i").pack
_int4: Final = Struct("!ii").pack
_int8: Final = Struct("!iq").pack

#: PostgreSQL counts microseconds from here …
_EPOCH_MS: Final = 946_684_800_000
#: … and Python's calendar ends here.
_LAST_MS: Final = 253_402_300_799_000


async def event_rows(drafts: Sequence[Draft], queue: str) -> AsyncIterator[bytes]:
    """All events of the drafts, numbered on from each draft's `seq`, in the order of `EVENT_COLUMNS`."""
    yield _HEAD
    in_queue = _text(queue)
    for start in range(0, len(drafts), _CHUNK):
        yield _encoded(drafts[start : start + _CHUNK], in_queue)
        await asyncio.sleep(0)
    yield _TAIL


def _encoded(drafts: Sequence[Draft], in_queue: bytes) -> bytes:
    parts: list[bytes] = []
    add = parts.append
    for draft in drafts:
        job_id = draft.job_id.encode()
        name = b"".join((_FIELDS, _name(draft.tenant_id), _length(len(job_id)), job_id, in_queue))
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
def _kind(word: str, from_state: State | None, to_state: State | None) -> bytes:
    states = (_NULL if state is None else _text(state) for state in (from_state, to_state))
    return b"".join((_text(word), *states))


@lru_cache(maxsize=1_000)
def _number(value: int) -> bytes:
    return _int4(4, value)


@lru_cache(maxsize=10_000)
def _instant(ms: int) -> bytes:
    return _int8(8, (min(ms, _LAST_MS) - _EPOCH_MS) * 1_000)
