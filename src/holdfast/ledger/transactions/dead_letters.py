"""Transactions on dead letters: discard by two operators, keep, replay (requirements D3, D4).

Every change locks the dead letter's row first. A replay is reserved here (its number and its job's id), submitted by
the caller, and marked as submitted; a concurrent caller gets the same reservation.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import msgspec
from sqlalchemy import Executable, Select, and_, select, tuple_, update

from holdfast.core.job import Meta, Priority, decode_meta, new_job_ids
from holdfast.core.principal import AuditEntry
from holdfast.core.text import clean, decode_text
from holdfast.errors import Conflict, Forbidden
from holdfast.ledger.port.operators import DeadLetterStatus, ReplayReservation
from holdfast.ledger.transactions.base import NOW, ClockRead, Row, SqlTransaction, chunks, insert_audit, lock_row
from holdfast.schema import dlq_items, jobs

_PENDING = dlq_items.c.replay_pending == 1


def request_discard(tenants: Sequence[str] | None, dlq_id: str, *, actor: str, reason: str) -> SqlTransaction[None]:
    row = yield from _locked(tenants, dlq_id)
    _must_be(row, DeadLetterStatus.OPEN)
    requested = {"status": DeadLetterStatus.DISCARD_REQUESTED.value, "requested_by": actor, "reason": reason}
    yield from _change(row, "operator.dlq_discard_request", actor, reason, **requested, confirmed_by=None)
    return None


def confirm_discard(tenants: Sequence[str] | None, dlq_id: str, *, actor: str) -> SqlTransaction[None]:
    row = yield from _locked(tenants, dlq_id)
    _must_be(row, DeadLetterStatus.DISCARD_REQUESTED)
    if row["requested_by"] == clean(actor):
        raise Forbidden(f"{actor} requested the discard of dead letter {dlq_id}; another person has to confirm it")
    confirmed = {"status": DeadLetterStatus.DISCARDED.value, "confirmed_by": actor}
    yield from _change(row, "operator.dlq_discard", actor, row["reason"] or "", **confirmed)
    return None


def keep(tenants: Sequence[str] | None, dlq_id: str, *, actor: str, reason: str) -> SqlTransaction[None]:
    row = yield from _locked(tenants, dlq_id)
    _must_be(row, DeadLetterStatus.DISCARD_REQUESTED)
    kept = {"status": DeadLetterStatus.OPEN.value, "requested_by": None, "reason": None}
    yield from _change(row, "operator.dlq_keep", actor, reason, **kept)
    return None


def reserve_replay(
    tenants: Sequence[str] | None,
    dlq_id: str,
    *,
    actor: str,
    reason: str,
    payload: bytes | None,
    expected: int | None,
) -> SqlTransaction[ReplayReservation]:
    row = yield from _locked(tenants, dlq_id)
    if not row["replay_pending"]:
        _must_be(row, DeadLetterStatus.OPEN, DeadLetterStatus.REPLAYED)
        if expected is not None and expected != row["replay_count"]:
            result = f"as job {row['replayed_as']}" if row["replayed_as"] else "and that was refused"
            raise Conflict(f"dead letter {dlq_id} has been replayed meanwhile, {result}; read it again and retry")
        yield from _change(
            row,
            "operator.dlq_replay",
            actor,
            reason,
            status=DeadLetterStatus.REPLAYED.value,
            requested_by=actor,
            confirmed_by=None,
            reason=reason,
            replayed_as=new_job_ids(1)[0],
            replay_count=row["replay_count"] + 1,
            replay_payload=None if payload is None else decode_text(payload),
            replay_pending=1,
        )
    same_row = (dlq_items.c.tenant_id == row["tenant_id"], dlq_items.c.dlq_id == row["dlq_id"])
    rows = yield _replays().where(*same_row)
    return _replay(rows[0])


def cancel_replay(replay: ReplayReservation, *, actor: str, reason: str) -> SqlTransaction[None]:
    row = yield from _locked([replay.tenant_id], replay.dlq_id)
    if row["replay_pending"] and row["replay_count"] == replay.number:
        yield from _change(
            row,
            "operator.dlq_replay_refused",
            actor,
            reason,
            status=DeadLetterStatus.OPEN.value,
            requested_by=None,
            reason=None,
            replayed_as=None,
            replay_payload=None,
            replay_pending=0,
        )
    return None


def unsubmitted(limit: int, after: ReplayReservation | None) -> SqlTransaction[list[ReplayReservation]]:
    position = tuple_(dlq_items.c.tenant_id, dlq_items.c.dlq_id)
    query = _replays().where(_PENDING)
    if after is not None:
        query = query.where(position > tuple_(after.tenant_id, after.dlq_id))
    rows = yield query.order_by(*position.clauses).limit(limit)
    return [_replay(row) for row in rows]


def mark_submitted(replays: Sequence[ReplayReservation]) -> SqlTransaction[None]:
    replay = tuple_(dlq_items.c.tenant_id, dlq_items.c.dlq_id, dlq_items.c.replay_count)
    for chunk in chunks(replays):
        ids = [(row.tenant_id, row.dlq_id, row.number) for row in chunk]
        yield update(dlq_items).where(replay.in_(ids), _PENDING).values(replay_pending=0)
    return None


def _locked(tenants: Sequence[str] | None, dlq_id: str) -> Generator[Executable | ClockRead, Any, Row]:
    return (yield from lock_row(dlq_items, dlq_items.c.dlq_id, "dead letter", dlq_id, tenants))


def _must_be(row: Row, *statuses: DeadLetterStatus) -> None:
    if row["status"] in statuses:
        return
    name = f"dead letter {row['dlq_id']}"
    match DeadLetterStatus(row["status"]):
        case DeadLetterStatus.OPEN:
            raise Conflict(f"no discard of {name} was requested; request it first, then have another person confirm")
        case DeadLetterStatus.DISCARD_REQUESTED:
            raise Conflict(f"{row['requested_by']} has requested the discard of {name}; confirm it, or keep it first")
        case DeadLetterStatus.DISCARDED:
            raise Conflict(f"{name} has been discarded by {row['requested_by']} and {row['confirmed_by']}")
        case DeadLetterStatus.REPLAYED:
            raise Conflict(f"{name} has been replayed as job {row['replayed_as']}; it cannot be discarded")


def _change(
    row: Row, verb: str, actor: str, audit_reason: str, **values: Any
) -> Generator[Executable | ClockRead, Any, None]:
    now = yield NOW
    yield (
        update(dlq_items)
        .where(dlq_items.c.tenant_id == row["tenant_id"], dlq_items.c.dlq_id == row["dlq_id"])
        .values(**values)
    )
    after = {"status": values["status"], "job_id": row["job_id"]}
    if values.get("replayed_as"):
        after |= {
            "replayed_as": values["replayed_as"],
            "number": values["replay_count"],
            "edited": values["replay_payload"] is not None,
        }
    entry = AuditEntry(
        type=verb,
        actor=actor,
        tenant_id=row["tenant_id"],
        target="dlq",
        target_id=row["dlq_id"],
        queue=row["queue"],
        reason=audit_reason,
        before={"status": row["status"]},
        after=after,
    )
    yield insert_audit([entry], now)


def _replays() -> Select[Any]:
    """Select dead letters with columns of their jobs; a job may have been pruned."""
    of_job = and_(
        jobs.c.tenant_id == dlq_items.c.tenant_id,
        jobs.c.job_id == dlq_items.c.job_id,
        jobs.c.queue == dlq_items.c.queue,
    )
    return select(dlq_items, jobs.c.idempotency_key, jobs.c.context, jobs.c.priority, jobs.c.meta).select_from(
        dlq_items.outerjoin(jobs, of_job)
    )


def _replay(row: Row) -> ReplayReservation:
    replay, context, payload = _meta(row["meta"]).replay, row["context"], row["replay_payload"]
    return ReplayReservation(
        tenant_id=row["tenant_id"],
        dlq_id=row["dlq_id"],
        job_id=row["job_id"],
        queue=row["queue"],
        job_type=row["job_type"],
        trace_id=row["trace_id"],
        # Of the first job in a chain of replays: effects keyed by it remain the same effects.
        idempotency_key=replay.key if replay is not None else row["idempotency_key"] or row["job_id"],
        context=None if context is None else msgspec.json.decode(context),
        priority=int(Priority.NORMAL) if row["priority"] is None else row["priority"],
        payload=(row["payload"] if payload is None else payload).encode(),
        new_job_id=row["replayed_as"],
        number=row["replay_count"],
        actor=row["requested_by"] or "",
    )


def _meta(text: str | None) -> Meta:
    try:
        return decode_meta(text)
    except msgspec.DecodeError:
        # From a foreign message.
        return Meta()
