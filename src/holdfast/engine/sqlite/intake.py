"""Submission on SQLite: new jobs of one queue, in one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from holdfast.core.job import Envelope, Priority, Receipt
from holdfast.core.states import State
from holdfast.engine.port.jobs import FEED_BEHIND, FEED_DETACHED, INTAKE_FULL, INTAKE_PAUSED
from holdfast.engine.sqlite.feed import FeedWriter, notify_due
from holdfast.engine.sqlite.moves import ApprovalRequestRow, insert_approval_requests
from holdfast.engine.sqlite.rows import encode_meta, tenant_controls
from holdfast.engine.sqlite.store import EngineContext
from holdfast.errors import FeedDetached, FeedFull, IntakeLimited, IntakeRefused, InvalidOption, InvalidPayload
from holdfast.sqlite.transaction import Transaction, Value, json_list, require_rows

_PRIORITIES: Final = frozenset(int(priority) for priority in Priority)


class KnownJobRow(msgspec.Struct, array_like=True, frozen=True):
    job_id: str
    tenant_id: str
    keyless: bool
    expired: bool


class KnownKeyRow(msgspec.Struct, array_like=True, frozen=True):
    tenant_id: str
    key: str
    job_id: str
    expired: bool


class IntakeControlRow(msgspec.Struct, array_like=True, frozen=True):
    intake_paused: int = 0
    intake_limit: int | None = None
    tenants: str | None = None


class IntakeState(msgspec.Struct, array_like=True, frozen=True):
    control: IntakeControlRow | None
    has_reader: int
    unread_bytes: int | None
    jobs: list[KnownJobRow]
    keys: list[KnownKeyRow]


_KNOWN: Final = msgspec.json.Decoder(IntakeState)
_BACKLOG: Final = msgspec.json.Decoder(tuple[int, list[tuple[str, int]]])


def submit(transaction: Transaction, policy: EngineContext, queue: str, envelopes: Sequence[Envelope]) -> list[Receipt]:
    """Accept new jobs; returns one receipt per envelope.

    Raises `IntakeRefused` and writes nothing if the queue refuses any of them.
    """
    now_ms = policy.clock.now_ms()
    known = _read_intake(transaction, policy, queue, envelopes, now_ms)
    _check_intake(known, policy, queue)
    receipts, accepted = _find_duplicates(known, envelopes)
    if accepted:
        _check_limits(transaction, known.control or IntakeControlRow(), queue, accepted)
        _write(transaction, policy, queue, accepted, now_ms)
    return receipts


def text_of(payload: bytes) -> str:
    """A payload as stored: JSON is text. Raises `InvalidPayload`."""
    try:
        return payload.decode()
    except UnicodeDecodeError as exc:
        raise InvalidPayload(f"the payload is not JSON: it is not UTF-8 ({exc.reason} at byte {exc.start})") from exc


def check_envelope(envelope: Envelope) -> None:
    """Raise for an envelope that could not be stored or would never be claimed."""
    if envelope.meta.priority not in _PRIORITIES:
        raise InvalidOption(f"priority {envelope.meta.priority!r} is not one of {sorted(_PRIORITIES)}")
    text_of(envelope.payload)


def _read_intake(
    transaction: Transaction, policy: EngineContext, queue: str, envelopes: Sequence[Envelope], now_ms: int
) -> IntakeState:
    names = [envelope.job_id for envelope in envelopes]
    names += [envelope.idempotency_key for envelope in envelopes if envelope.idempotency_key]
    return transaction.rows(
        "intake_state",
        _KNOWN,
        queue=queue,
        now=now_ms,
        window=policy.options.idempotency_window_ms,
        names=json_list(names),
        tenants=json_list(list({envelope.tenant_id for envelope in envelopes})),
    )


def _check_intake(known: IntakeState, policy: EngineContext, queue: str) -> None:
    if known.control is not None and known.control.intake_paused:
        raise IntakeRefused(queue, INTAKE_PAUSED)
    if policy.options.ledger and not known.has_reader:
        raise FeedDetached(queue, FEED_DETACHED)
    limit = policy.options.feed_max_bytes
    if known.unread_bytes is not None and known.unread_bytes > limit:
        raise FeedFull(queue, FEED_BEHIND)


def _check_limits(
    transaction: Transaction, control: IntakeControlRow, queue: str, envelopes: Sequence[Envelope]
) -> None:
    """Raise `IntakeLimited` if the backlog of the queue, or of a tenant in it, would exceed its limit."""
    coming = Counter(envelope.tenant_id for envelope in envelopes)
    controls = tenant_controls(control.tenants)
    limits = {
        tenant: limit
        for tenant in coming
        if tenant in controls and (limit := controls[tenant].intake_limit) is not None
    }
    limit = control.intake_limit
    if limit is None and not limits:
        return
    count, tenants = transaction.rows(
        "count_backlog",
        _BACKLOG,
        queue=queue,
        most=0 if limit is None else limit + 1,
        tenants=json_list(list(limits)),
        most_each=max(limits.values(), default=0) + 1,
    )
    if limit is not None and count + len(envelopes) > limit:
        raise IntakeLimited(queue, f"{INTAKE_FULL} (its limit is {limit})")
    for tenant, already in tenants:
        if already + coming[tenant] > limits[tenant]:
            raise IntakeLimited(queue, f"{INTAKE_FULL} (the limit of tenant {tenant!r} is {limits[tenant]})")


def _find_duplicates(known: IntakeState, envelopes: Sequence[Envelope]) -> tuple[list[Receipt], list[Envelope]]:
    """Receipts, and the new envelopes: those not known by their id (a resend) or their key (a duplicate)."""
    ids = {job.job_id for job in known.jobs}
    firsts = {(job.tenant_id, job.job_id): job.job_id for job in known.jobs if job.keyless and not job.expired}
    firsts |= {(key.tenant_id, key.key): key.job_id for key in known.keys if not key.expired}
    receipts, accepted = [], []
    for envelope in envelopes:
        job_id = envelope.job_id
        key = (envelope.tenant_id, envelope.idempotency_key or job_id)
        if job_id in ids:
            receipts.append(Receipt(job_id))
        elif key in firsts:
            receipts.append(Receipt(firsts[key], duplicate=firsts[key] != job_id))
        else:
            ids.add(job_id)
            firsts[key] = job_id
            accepted.append(envelope)
            receipts.append(Receipt(job_id))
    return receipts, accepted


def _write(
    transaction: Transaction, policy: EngineContext, queue: str, envelopes: Sequence[Envelope], now_ms: int
) -> None:
    rows = [_job_row(envelope, now_ms) for envelope in envelopes]
    last, count = transaction.bulk("insert_jobs", rows, before=(now_ms, now_ms, queue))
    require_rows(count, len(rows), "submit")
    window_ms = policy.options.idempotency_window_ms
    keys = [
        (each.tenant_id, each.idempotency_key, each.job_id, now_ms + (each.meta.key_window_ms or window_ms))
        for each in envelopes
        if each.idempotency_key
    ]
    if keys:
        transaction.bulk("insert_submission_keys", keys, before=(queue,))
    transaction.run("mark_queue_used", queue=queue)
    urgent = any(envelope.durable for envelope in envelopes)
    journal = FeedWriter(transaction, queue, policy.options, urgent=urgent)
    size = sum(len(envelope.payload) for envelope in envelopes)
    journal.add_events(*transaction.add("insert_created_events", first=last - count + 1, last=last), size)
    journal.close()
    requests = [
        ApprovalRequestRow(each.tenant_id, each.job_id, each.task, each.meta.approval_request)
        for each in envelopes
        if each.hold and each.meta.approval_request is not None
    ]
    insert_approval_requests(transaction, policy, queue, requests)
    transaction.effects.ready.add(queue)
    # Element 10 of a row: when a delayed job is due.
    dues = [row[10] for row in rows if row[10] is not None]
    if dues:
        notify_due(transaction, queue, min(int(due) for due in dues))


def _job_row(envelope: Envelope, now_ms: int) -> tuple[Value, ...]:
    due_at_ms = max(envelope.run_at_ms, now_ms + envelope.delay_ms if envelope.delay_ms > 0 else 0)
    run_at = due_at_ms if due_at_ms > now_ms else None
    ready = not envelope.hold and run_at is None
    meta = envelope.meta
    return (
        envelope.job_id,
        envelope.tenant_id,
        envelope.task,
        State.WAITING_APPROVAL.value if envelope.hold else State.QUEUED.value,
        int(meta.priority),
        envelope.idempotency_key,
        envelope.trace_id,
        meta.dlq_id or None,
        run_at,
        now_ms if ready else None,
        None if envelope.hold else run_at,
        encode_meta(meta),
        envelope.payload.decode(),
    )
