"""Decode entries of the feed into events.

An entry is one atomic step; its `kind` says how its moves are packed. Other programs can write to the stream: what
cannot be read, or not be stored by every ledger, gives no events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final

import msgspec

from holdfast.core.job import DEFAULT_TENANT, Event
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
from holdfast.engine.redis.feed_moves import (
    WIDTHS,
    read_count,
    read_data,
    read_history,
    read_instant,
    read_meta,
    strides,
    text_in,
    unpack_moves,
)
from holdfast.engine.redis.wire import as_dict

_FIELDS: Final = {b"kind", b"at", b"worker", b"nonce", b"moves"}

#: A look-up is much faster than a call of the enumeration.
_STATES: Final = {state.value: state for state in State}
_NEXT_FROM: Final = {State.DLQ_RECORDED: State.DLQ_PENDING, State.FAILED: State.DLQ_RECORDED}


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
    kind, at_ms = fields[b"kind"].decode(), read_instant(fields[b"at"])
    moves = unpack_moves(kind, fields[b"moves"], fields.get(b"skipped"))
    return list(_READERS[kind](moves, at_ms, fields[b"worker"].decode()))


def _decode_created(moves: list[Any], at_ms: int, worker: str) -> Iterator[Event]:
    for _, job_id, task, payload, due, _, tenant, key, trace, meta in strides(moves, WIDTHS["created"]):
        *hold, how, ms = due.split() if " " in due else (*due.split(), "", "0")
        run_at_ms = at_ms + read_instant(ms) if how == "in" else read_instant(ms)
        state = State.WAITING_APPROVAL if hold else State.QUEUED
        yield _creation(job_id, state, at_ms, tenant, task, payload, key, trace, meta, run_at_ms)


def _created_plain(moves: list[Any], at_ms: int, worker: str) -> Iterator[Event]:
    for _, job_id, task, payload in strides(moves, WIDTHS["created_plain"]):
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
    meta = read_meta(meta_text)
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
    for job_id, head, tenant in strides(moves, WIDTHS["claimed"]):
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
        yield _claim(
            job_id, State.RETRYING, at_ms, tenant, worker, read_count(attempts + deliveries), read_count(retries)
        )


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
            attempt=read_count(attempts + deliveries),
            retry_count=read_count(known_retries or retries),
            worker=worker,
            message=f"lease of {owner} was lost",
            data={"old_worker": owner, "new_worker": worker, "message_id": message_id},
        )


def _decode_adopted(moves: list[Any], at_ms: int, worker: str) -> Iterator[Event]:
    dead_letters: dict[str, dict[str, Any]] = {}
    for kind, job_id, tenant, *rest in moves:
        match kind:
            case "created":
                texts: list[Any] = [str(value) for value in rest]
                yield _creation(job_id, State.QUEUED, at_ms, tenant, *texts)
            case "claimed":
                attempt, claimer = rest
                yield _claim(job_id, State.QUEUED, at_ms, tenant, str(claimer), read_count(attempt), 0)
            case "reclaimed":
                *lease, claimer, retries = rest
                yield from _decode_reclaimed([[job_id, "", *lease, retries, tenant]], at_ms, str(claimer))
            case "duplicate":
                # The previous version wrote only the message's id.
                yield _duplicate(job_id, at_ms, tenant, worker, str(rest[0]), differs=rest[1:] == [1])
            case _:
                to_state = State(kind)
                from_state = _NEXT_FROM.get(to_state, State.QUEUED)
                if rest:
                    dead_letters[job_id] = data = read_data(rest[0])
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
    for _, _, _, _, job_id, target, data, attempt, retries, more in strides(moves, WIDTHS["settled"]):
        to_state = _STATES[target]
        details: dict[str, Any] = {}
        if data:
            details = {"result": data} if to_state is State.SUCCEEDED else read_data(data)
        tenant = ""
        if more:
            delay_ms, _, _, dead_letter, owner = more
            tenant = str(owner)
            if to_state is State.RETRYING or (to_state is State.QUEUED and delay_ms):
                details["next_attempt_at_ms"] = at_ms + delay_ms
            elif to_state is State.DLQ_PENDING:
                details |= _dead_letter(dead_letter)
        yield _step(
            job_id,
            State.RUNNING,
            to_state,
            at_ms,
            tenant,
            worker,
            details or None,
            read_count(attempt),
            read_count(retries),
        )


def _dead_letter(fields: list[str]) -> dict[str, Any]:
    """Event data of a dead letter, besides its failure."""
    values = dict(zip(fields[::2], fields[1::2], strict=True))
    return {"dlq_id": values["dlq_id"], "history": read_history(values["history"])}


def _decode_moved(moves: list[Any], at_ms: int, worker: str) -> Iterator[Event]:
    for job_id, from_state, target, attempt, retries, data, tenant in strides(moves, WIDTHS["moved"]):
        details = read_data(data) if data else None
        states = State(from_state), State(target)
        yield _step(job_id, *states, at_ms, tenant, worker, details, read_count(attempt), read_count(retries))


def _operator(moves: list[Any], at_ms: int, worker: str) -> Iterator[Event]:
    """Moves of operators, with their event type, and audit entries."""
    for kind, job_id, from_state, target, attempt, retries, data, tenant in strides(moves, WIDTHS["operator"]):
        details = read_data(data) if data else None
        if target:
            states = State(from_state), State(target)
            event = _step(job_id, *states, at_ms, tenant, worker, details, read_count(attempt), read_count(retries))
            yield msgspec.structs.replace(event, type=kind) if kind else event
            continue
        yield Event(
            type=kind,
            job_id=job_id,
            at_ms=at_ms,
            tenant_id=tenant or DEFAULT_TENANT,
            attempt=read_count(attempt),
            retry_count=read_count(retries),
            message=text_in(details or {}, "reason"),
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
            attempt=read_count(attempt),
            retry_count=read_count(retries),
            message="lost by the engine; restored from the ledger",
            data={"next_attempt_at_ms": int(due_at_ms)} if due_at_ms else None,
        )


def _heartbeat(moves: list[Any], at_ms: int, worker: str) -> Iterator[Event]:
    for job_id, head, deliveries, known_retries, tenant in strides(moves, WIDTHS["heartbeat"]):
        _, attempts, retries = _head(head)
        yield Event(
            type=HEARTBEAT_EVENT,
            job_id=job_id,
            at_ms=at_ms,
            tenant_id=tenant or DEFAULT_TENANT,
            attempt=read_count(attempts + deliveries),
            retry_count=read_count(known_retries or retries),
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
    message = text_in(data, "message", "reason") if data else ""
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
        return State(state), read_count(attempts), read_count(retries)
    except ValueError:
        return State.QUEUED, 0, 0
