"""The feed on Redis: attach its reader, read, wait, trim, and decode entries into events.

An entry is one atomic step; its `kind` says how its moves are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from holdfast.core.job import DEFAULT_TENANT, Event, decode_meta
from holdfast.core.states import (
    ARGUMENTS_DIFFER,
    COPY_DROPPED,
    DUPLICATE_EVENT,
    HEARTBEAT_EVENT,
    REQUEST_DROPPED,
    RESTORED_EVENT,
    State,
    event_for,
)
from holdfast.engine.port.feed import FeedEntry
from holdfast.engine.redis.net.client import Purpose
from holdfast.engine.redis.store import RedisStore
from holdfast.engine.redis.wire import as_dict

_FIELDS: Final = {b"kind", b"at", b"worker", b"nonce", b"moves"}
#: Values per job in entries that carry the arguments of a script unchanged.
_WIDTHS: Final = {"created": 10, "created_plain": 4, "settled": 10, "settled_for_ledger": 10}

#: A look-up is much faster than a call of the enumeration.
_STATES: Final = {state.value: state for state in State}
_NEXT_FROM: Final = {State.DLQ_RECORDED: State.DLQ_PENDING, State.FAILED: State.DLQ_RECORDED}


#: A feed tail up to this length is trimmed on every call.
_SMALL_TAIL: Final = 100


class Feed:
    """The feeds of one Redis."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        #: Length of each feed after it was last trimmed.
        self._kept: dict[str, int] = {}

    async def read(self, queue: str, start: str, limit: int) -> list[FeedEntry]:
        command = (b"XRANGE", self._store.keys(queue).feed, start or b"-", b"+", b"COUNT", limit)
        return [parse_feed_entry(entry) for entry in await self._store.client.call(Purpose.OTHER, *command)]

    async def wait(self, positions: Mapping[str, str], wait_ms: int) -> list[str]:
        if not positions:
            return []
        queues = {self._store.keys(queue).feed: queue for queue in positions}
        # BLOCK 0 would block for ever.
        block = (b"BLOCK", wait_ms) if wait_ms > 0 else ()
        after = {stream: positions[queue] or "0-0" for stream, queue in queues.items()}
        head = (b"XREAD", b"COUNT", 1, *block)
        reply = await self._store.client.read(None, head, after, max(0, wait_ms) / 1000)
        return [queues[stream] for stream, _ in reply]

    async def is_whole(self, queue: str, position: str) -> bool:
        feed, call = self._store.keys(queue).feed, self._store.client.call
        if position and await call(Purpose.OTHER, b"XRANGE", feed, b"-", position, b"COUNT", 1):
            return True
        # A trimmed feed keeps its tail and the entry at the reader's position; one without a reader keeps the limit.
        options = self._store.options
        length: int = await call(Purpose.OTHER, b"XLEN", feed)
        return length <= (options.feed_tail if options.ledger else options.feed_limit - 1)

    async def epoch(self, queue: str) -> str:
        return (await self._store.client.epoch(Purpose.OTHER, self._store.keys(queue).control)).decode()

    async def attach_reader(self, queue: str, epoch: str, *, keys_restored: bool) -> None:
        keys = self._store.keys(queue)
        # `again`: a wipe may have removed the queue from the list.
        await self._store.register_queue(queue, again=True)
        names = [keys.control, keys.feed] if keys_restored else [keys.control]
        arguments = [epoch or await self.epoch(queue), self._store.nonce()]
        await self._store.run(Purpose.OTHER, "attach_reader", queue, names, arguments)

    async def trim(self, queue: str, position: str) -> None:
        keys, tail = self._store.keys(queue), self._store.options.feed_tail
        kept = self._kept.get(queue)
        if kept is not None and tail > _SMALL_TAIL:
            # Finding the start of a long tail costs as much as reading it, so trim only after it has grown by a tenth.
            # `kept` leaves out entries unread at the last trim, so that they count as growth and cannot fill the feed.
            length = await self._store.client.call(Purpose.OTHER, b"XLEN", keys.feed)
            if kept <= length < kept + tail // 10:
                return
        arguments = [position, tail, int(self._store.has_autoclaim)]
        self._kept[queue] = await self._store.run(
            Purpose.OTHER, "trim_feed", queue, [keys.feed, keys.control], arguments
        )


def parse_feed_entry(entry: list[Any]) -> FeedEntry:
    """Decode a stream entry into events, in the order in which they happened.

    Never raises: an entry that cannot be decoded (written by another program, damaged, from a newer release) must not
    stop the feed. It gives no events, and `error` says why.
    """
    position, fields = entry[0].decode(), as_dict(entry[1])
    nonce = fields.get(b"nonce", b"").decode("utf-8", "replace")
    if not fields.keys() >= _FIELDS:
        return FeedEntry(position, nonce, [], error=f"not written by holdfast: {fields!r:.200}")
    moves = fields[b"moves"]
    try:
        events = _events(fields)
    except Exception as exc:  # noqa: BLE001 - the bytes can be anything
        kind = fields[b"kind"].decode("utf-8", "replace")
        return FeedEntry(position, nonce, [], size=len(moves), error=f"kind {kind!r:.100} cannot be read: {exc!r:.200}")
    return FeedEntry(position, nonce, events, b"urgent" in fields or b"hurry" in fields, len(moves))


def _events(fields: dict[bytes, bytes]) -> list[Event]:
    kind, moves = fields[b"kind"].decode(), _unpack(fields[b"moves"])
    if skipped := fields.get(b"skipped"):
        moves = _drop_skipped(moves, set(_unpack(skipped)), _WIDTHS[kind])
    return list(_READERS[kind](moves, int(fields[b"at"]), fields[b"worker"].decode()))


def _decode_created(moves: list[Any], at_ms: int, worker: str) -> Iterator[Event]:
    for _, job_id, task, payload, due, _, tenant, key, trace, meta in _strides(moves, _WIDTHS["created"]):
        *hold, how, ms = due.split() if " " in due else (*due.split(), "", "0")
        run_at_ms = at_ms + int(ms) if how == "in" else int(ms)
        state = State.WAITING_APPROVAL if hold else State.QUEUED
        yield _creation(job_id, state, at_ms, tenant, task, payload, key, trace, meta, run_at_ms)


def _created_plain(moves: list[Any], at_ms: int, worker: str) -> Iterator[Event]:
    for _, job_id, task, payload in _strides(moves, _WIDTHS["created_plain"]):
        yield _creation(job_id, State.QUEUED, at_ms, DEFAULT_TENANT, task, payload, job_id, "", "")


def _creation(
    job_id: str,
    state: State,
    at_ms: int,
    tenant: str,
    task: str,
    payload: str,
    key: str,
    trace: str,
    meta_text: str,
    run_at_ms: int = 0,
) -> Event:
    meta = decode_meta(meta_text)
    data = {
        "task": task,
        "payload": payload,
        "tenant_id": tenant or DEFAULT_TENANT,
        "idempotency_key": key,
        "trace_id": trace,
        "priority": int(meta.priority),
        "context": meta.context,
        "run_at_ms": run_at_ms,
    }
    if meta_text:
        data["meta"] = meta_text
    return Event(
        type=event_for(None, state),
        job_id=job_id,
        at_ms=at_ms,
        tenant_id=tenant or DEFAULT_TENANT,
        to_state=state,
        data=data,
    )


def _decode_claimed(moves: list[Any], at_ms: int, worker: str) -> Iterator[Event]:
    for job_id, head, tenant in _strides(moves, 3):
        state, attempts, retries = _head(head)
        yield _claim(job_id, state, at_ms, tenant, worker, attempts + 1, retries)


def _claim(job_id: str, from_state: State, at_ms: int, tenant: str, worker: str, attempt: int, retries: int) -> Event:
    return Event(
        type=event_for(from_state, State.RUNNING),
        job_id=job_id,
        at_ms=at_ms,
        tenant_id=tenant or DEFAULT_TENANT,
        from_state=from_state,
        to_state=State.RUNNING,
        attempt=attempt,
        retry_count=retries,
        worker=worker,
    )


def _retry_claimed(moves: list[Any], at_ms: int, worker: str) -> Iterator[Event]:
    for job_id, head, deliveries, retries, tenant in moves:
        _, attempts, _ = _head(head)
        yield _claim(job_id, State.RETRYING, at_ms, tenant, worker, attempts + deliveries, int(retries))


def _decode_reclaimed(moves: list[Any], at_ms: int, worker: str) -> Iterator[Event]:
    for job_id, head, deliveries, owner, message_id, known_retries, tenant in moves:
        _, attempts, retries = _head(head)
        yield Event(
            type=event_for(State.RUNNING, State.RUNNING),
            job_id=job_id,
            at_ms=at_ms,
            tenant_id=tenant or DEFAULT_TENANT,
            from_state=State.RUNNING,
            to_state=State.RUNNING,
            attempt=attempts + deliveries,
            retry_count=int(known_retries or retries),
            worker=worker,
            message=f"lease of {owner} was lost",
            data={"old_worker": owner, "new_worker": worker, "message_id": message_id},
        )


def _decode_adopted(moves: list[Any], at_ms: int, worker: str) -> Iterator[Event]:
    dead_letters: dict[str, dict[str, Any]] = {}
    for kind, job_id, tenant, *rest in moves:
        match kind:
            case "created":
                yield _creation(job_id, State.QUEUED, at_ms, tenant, *rest)
            case "claimed":
                attempt, claimer = rest
                yield _claim(job_id, State.QUEUED, at_ms, tenant, claimer, attempt, 0)
            case "reclaimed":
                *lease, claimer, retries = rest
                yield from _decode_reclaimed([[job_id, "", *lease, retries, tenant]], at_ms, claimer)
            case "duplicate":
                # The previous version wrote only the message's id.
                yield _duplicate(job_id, at_ms, tenant, worker, rest[0], differs=rest[1:] == [1])
            case _:
                to_state = State(kind)
                from_state = _NEXT_FROM.get(to_state, State.QUEUED)
                if rest:
                    dead_letters[job_id] = data = msgspec.json.decode(rest[0])
                else:
                    data = {"dlq_id": dead_letters[job_id]["dlq_id"]}
                yield _step(job_id, from_state, to_state, at_ms, tenant, worker, data)


def _duplicate(job_id: str, at_ms: int, tenant: str, worker: str, message_id: str, *, differs: bool) -> Event:
    """`message_id` is empty for a submission."""
    data: dict[str, Any] = {"message_id": message_id} if message_id else {}
    return Event(
        type=DUPLICATE_EVENT,
        job_id=job_id,
        at_ms=at_ms,
        tenant_id=tenant or DEFAULT_TENANT,
        worker=worker,
        message=REQUEST_DROPPED if differs else COPY_DROPPED,
        data=data | {ARGUMENTS_DIFFER: True} if differs else data,
    )


def _decode_settled(moves: list[Any], at_ms: int, worker: str) -> Iterator[Event]:
    """Settles of an engine without a ledger: a dead-lettered job becomes final in the same step."""
    for event in _settled_for_ledger(moves, at_ms, worker):
        yield event
        if event.to_state is State.DLQ_PENDING:
            attempt, retries, tenant = event.attempt, event.retry_count, event.tenant_id
            data = {"dlq_id": (event.data or {}).get("dlq_id", "")}
            for from_state, to_state in ((State.DLQ_PENDING, State.DLQ_RECORDED), (State.DLQ_RECORDED, State.FAILED)):
                yield _step(event.job_id, from_state, to_state, at_ms, tenant, worker, data, attempt, retries)


def _settled_for_ledger(moves: list[Any], at_ms: int, worker: str) -> Iterator[Event]:
    for _, _, _, _, job_id, target, data, attempt, retries, more in _strides(moves, _WIDTHS["settled"]):
        to_state = _STATES[target]
        details: dict[str, Any] = {}
        if data:
            details = {"result": data} if to_state is State.SUCCEEDED else msgspec.json.decode(data)
        tenant = ""
        if more:
            delay_ms, _, _, dead_letter, tenant = more
            if to_state is State.RETRYING or (to_state is State.QUEUED and delay_ms):
                details["next_attempt_at_ms"] = at_ms + delay_ms
            elif to_state is State.DLQ_PENDING:
                details |= _dead_letter(dead_letter)
        yield _step(job_id, State.RUNNING, to_state, at_ms, tenant, worker, details or None, attempt, int(retries))


def _dead_letter(fields: list[str]) -> dict[str, Any]:
    """Event data of a dead letter, besides its failure."""
    values = dict(zip(fields[::2], fields[1::2], strict=True))
    return {"dlq_id": values["dlq_id"], "history": msgspec.json.decode(values["history"])}


def _decode_moved(moves: list[Any], at_ms: int, worker: str) -> Iterator[Event]:
    for job_id, from_state, target, attempt, retries, data, tenant in _strides(moves, 7):
        details = msgspec.json.decode(data) if data else None
        states = State(from_state), State(target)
        yield _step(job_id, *states, at_ms, tenant, worker, details, int(attempt), int(retries))


def _operator(moves: list[Any], at_ms: int, worker: str) -> Iterator[Event]:
    """Moves of operators, with their event type, and audit entries."""
    for kind, job_id, from_state, target, attempt, retries, data, tenant in _strides(moves, 8):
        details = msgspec.json.decode(data) if data else None
        if target:
            states = State(from_state), State(target)
            event = _step(job_id, *states, at_ms, tenant, worker, details, int(attempt), int(retries))
            yield msgspec.structs.replace(event, type=kind) if kind else event
            continue
        yield Event(
            type=kind,
            job_id=job_id,
            at_ms=at_ms,
            tenant_id=tenant or DEFAULT_TENANT,
            attempt=int(attempt),
            retry_count=int(retries),
            message=(details or {}).get("reason") or "",
            data=details,
        )


def _decode_restored(moves: list[Any], at_ms: int, worker: str) -> Iterator[Event]:
    for job_id, from_state, to_state, attempt, retries, due_at_ms, tenant in moves:
        yield Event(
            type=RESTORED_EVENT,
            job_id=job_id,
            at_ms=at_ms,
            tenant_id=tenant or DEFAULT_TENANT,
            from_state=State(from_state),
            to_state=State(to_state),
            attempt=attempt,
            retry_count=int(retries),
            message="lost by the engine; restored from the ledger",
            data={"next_attempt_at_ms": due_at_ms} if due_at_ms else None,
        )


def _heartbeat(moves: list[Any], at_ms: int, worker: str) -> Iterator[Event]:
    for job_id, head, deliveries, known_retries, tenant in _strides(moves, 5):
        _, attempts, retries = _head(head)
        yield Event(
            type=HEARTBEAT_EVENT,
            job_id=job_id,
            at_ms=at_ms,
            tenant_id=tenant or DEFAULT_TENANT,
            attempt=attempts + deliveries,
            retry_count=int(known_retries or retries),
            worker=worker,
        )


def _step(
    job_id: str,
    from_state: State,
    to_state: State,
    at_ms: int,
    tenant: str,
    worker: str,
    data: dict[str, Any] | None,
    attempt: int = 0,
    retry_count: int = 0,
) -> Event:
    message = (data.get("message") or data.get("reason") or "") if data else ""
    return Event(
        type=event_for(from_state, to_state),
        job_id=job_id,
        at_ms=at_ms,
        tenant_id=tenant or DEFAULT_TENANT,
        from_state=from_state,
        to_state=to_state,
        attempt=attempt,
        retry_count=retry_count,
        worker=worker,
        message=message,
        data=data,
    )


_READERS: Final[dict[str, Callable[[list[Any], int, str], Iterator[Event]]]] = {
    "created": _decode_created,
    "created_plain": _created_plain,
    "claimed": _decode_claimed,
    "adopted": _decode_adopted,
    "settled": _decode_settled,
    "settled_for_ledger": _settled_for_ledger,
    "reclaimed": _decode_reclaimed,
    "retried": _retry_claimed,
    "moved": _decode_moved,
    "operator": _operator,
    "restored": _decode_restored,
    "heartbeat": _heartbeat,
    # Kinds written by the previous version.
    "retaken": _retry_claimed,
    "told": _operator,
}


@lru_cache(maxsize=1_000)
def _head(head: str) -> tuple[State, int, int]:
    """State, attempts and retries in a message's header.

    Foreign messages have no header, and forged ones a wrong one: both count as queued, without attempts.
    """
    if not head:
        return State.QUEUED, 0, 0
    try:
        _, state, attempts, retries, _ = head.split()
        return State(state), int(attempts), int(retries)
    except ValueError:
        return State.QUEUED, 0, 0


def _strides(values: list[Any], width: int) -> Iterator[tuple[Any, ...]]:
    return zip(*(iter(values),) * width, strict=True)


def _drop_skipped(moves: list[Any], skipped: set[int], width: int) -> list[Any]:
    """Return the moves without the skipped ones, whose positions count from 1."""
    return [
        value
        for position in range(len(moves) // width)
        if position + 1 not in skipped
        for value in moves[position * width : (position + 1) * width]
    ]


def _unpack(packed: bytes) -> list[Any]:
    try:
        moves: list[Any] = msgspec.msgpack.decode(packed)
    except (UnicodeDecodeError, msgspec.DecodeError):
        # A forged message with holdfast's marker and bytes that are not text. It must not stop the feed.
        moves, _ = _unpack_leniently(packed, 0)
    return moves


def _unpack_leniently(packed: bytes, at: int) -> tuple[Any, int]:
    """Decode the subset of msgpack that scripts write: arrays, text and counts."""
    code = packed[at]
    if code <= 0x7F:
        return code, at + 1
    if 0xA0 <= code <= 0xBF or 0xD9 <= code <= 0xDB:
        width = 0 if code <= 0xBF else 1 << (code - 0xD9)
        start = at + 1 + width
        size = int.from_bytes(packed[at + 1 : start]) if width else code & 0x1F
        return packed[start : start + size].decode("utf-8", "replace"), start + size
    if 0x90 <= code <= 0x9F or code in (0xDC, 0xDD):
        width = {0xDC: 2, 0xDD: 4}.get(code, 0)
        size = int.from_bytes(packed[at + 1 : at + 1 + width]) if width else code & 0x0F
        at, items = at + 1 + width, []
        for _ in range(size):
            item, at = _unpack_leniently(packed, at)
            items.append(item)
        return items, at
    width = 1 << (code - 0xCC)
    return int.from_bytes(packed[at + 1 : at + 1 + width]), at + 1 + width
