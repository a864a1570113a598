"""Transactions on dead letters: discard by two operators, keep, replay (requirements D3, D4).

Every change locks the dead letter's row first. A replay is reserved here (its payload is checked, it gets a number and
its job's id), submitted by the caller, and marked as submitted. A call with the same idempotency key gets the same
replay; one without a key is refused while the latest replay is open, and after it has succeeded.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import Executable, Select, and_, delete, or_, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert as postgresql_insert

from holdfast.core.job import Meta, Priority, decode_meta, new_job_ids
from holdfast.core.principal import AuditEntry, fold_name
from holdfast.core.states import State
from holdfast.core.text import clean, decode_text
from holdfast.errors import AlreadyReplayed, Conflict, Forbidden, ReplayKeyReused
from holdfast.ledger.port.effects import EffectState
from holdfast.ledger.port.operators import DeadLetterStatus, PayloadCheck, ReplayKey, ReplayReservation
from holdfast.ledger.transactions.base import NOW, ClockRead, Row, SqlTransaction, insert_audit, lock_row
from holdfast.schema import dlq_items, jobs
from holdfast.schema import idempotency_keys as keys

_PENDING: Final = dlq_items.c.replay_pending == 1
#: A replay in one of these states has not done its work.
_FAILED: Final = frozenset({State.FAILED.value, State.CANCELLED.value})
#: Replays under a key share the table with effects.
_KEY_PREFIX: Final = "dlq.replay:"
_KEY_FUNCTION: Final = "dlq.replay"
#: What a replay takes from the job that failed.
_OF_FAILED_JOB: Final = (jobs.c.idempotency_key, jobs.c.context, jobs.c.priority, jobs.c.meta)


class _KnownReplay(msgspec.Struct, frozen=True):
    """The value of a replay's key."""

    job_id: str
    number: int
    previous: str


def request_discard(tenants: Sequence[str] | None, dlq_id: str, *, actor: str, reason: str) -> SqlTransaction[None]:
    row = yield from _lock(tenants, dlq_id)
    _must_be(row, DeadLetterStatus.OPEN)
    requested = {"status": DeadLetterStatus.DISCARD_REQUESTED.value, "requested_by": actor, "reason": reason}
    yield from _change(row, "operator.dlq_discard_request", actor, reason, **requested, confirmed_by=None)
    return None


def confirm_discard(tenants: Sequence[str] | None, dlq_id: str, *, actor: str) -> SqlTransaction[None]:
    row = yield from _lock(tenants, dlq_id)
    _must_be(row, DeadLetterStatus.DISCARD_REQUESTED)
    if fold_name(row["requested_by"]) == fold_name(clean(actor)):
        raise Forbidden(f"{actor} requested the discard of dead letter {dlq_id}; another person has to confirm it")
    confirmed = {"status": DeadLetterStatus.DISCARDED.value, "confirmed_by": actor}
    yield from _change(row, "operator.dlq_discard", actor, row["reason"] or "", **confirmed)
    return None


def keep(tenants: Sequence[str] | None, dlq_id: str, *, actor: str, reason: str) -> SqlTransaction[None]:
    row = yield from _lock(tenants, dlq_id)
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
    check: PayloadCheck | None,
    key: ReplayKey | None,
    again: bool,
) -> SqlTransaction[ReplayReservation]:
    row = yield from _lock(tenants, dlq_id)
    now = yield NOW
    before: str | None = row["replayed_as"]
    found = yield select(jobs.c.job_id, jobs.c.state, *_OF_FAILED_JOB).where(
        jobs.c.tenant_id == row["tenant_id"],
        jobs.c.queue == row["queue"],
        jobs.c.job_id.in_([row["job_id"], before or row["job_id"]]),
    )
    by_id = {job["job_id"]: job for job in found}
    # The failed job may have been pruned.
    failed_job = by_id.get(row["job_id"], dict.fromkeys(column.name for column in _OF_FAILED_JOB))
    row = {**row, **{column.name: failed_job[column.name] for column in _OF_FAILED_JOB}}
    if key is not None and (known := (yield from _find_replay(row, key, now))) is not None:
        return known
    _must_be(row, DeadLetterStatus.OPEN, DeadLetterStatus.REPLAYED)
    if before and row["replay_pending"]:
        raise AlreadyReplayed(dlq_id, before, pending=True)
    # A job that is not in the ledger yet is open.
    if before and not again and (before not in by_id or by_id[before]["state"] not in _FAILED):
        raise AlreadyReplayed(dlq_id, before)
    if check is not None:
        check(row["job_type"], row["payload"].encode() if payload is None else payload)
    reserved = {
        "status": DeadLetterStatus.REPLAYED.value,
        "requested_by": clean(actor),
        "confirmed_by": None,
        "reason": reason,
        "replayed_as": new_job_ids(1)[0],
        "replay_count": row["replay_count"] + 1,
        "replay_payload": None if payload is None else decode_text(payload),
        "replay_pending": 1,
    }
    yield from _change(row, "operator.dlq_replay", actor, reason, **reserved)
    replay = msgspec.structs.replace(_replay({**row, **reserved}), previous=before or "")
    if key is not None:
        yield from _keep_key(replay, key, now)
    return replay


def cancel_replay(replay: ReplayReservation, *, actor: str, reason: str) -> SqlTransaction[None]:
    row = yield from _lock([replay.tenant_id], replay.dlq_id)
    if row["replay_pending"] and row["replay_count"] == replay.number:
        status = DeadLetterStatus.REPLAYED if replay.previous else DeadLetterStatus.OPEN
        yield from _change(
            row,
            "operator.dlq_replay_refused",
            actor,
            reason,
            status=status.value,
            requested_by=None,
            reason=None,
            replayed_as=replay.previous or None,
            replay_payload=None,
            replay_pending=0,
        )
        yield delete(keys).where(keys.c.tenant_id == replay.tenant_id, keys.c.job_id == _owner(replay))
    return None


def find_unsubmitted(limit: int, after: ReplayReservation | None) -> SqlTransaction[list[ReplayReservation]]:
    position = tuple_(dlq_items.c.tenant_id, dlq_items.c.dlq_id)
    query = _replays().where(_PENDING)
    if after is not None:
        query = query.where(position > tuple_(after.tenant_id, after.dlq_id))
    rows = yield query.order_by(*position.clauses).limit(limit)
    return [_replay(row) for row in rows]


def mark_submitted(replays: Sequence[ReplayReservation]) -> SqlTransaction[None]:
    for replay in replays:
        yield (
            update(dlq_items)
            .where(
                dlq_items.c.tenant_id == replay.tenant_id,
                dlq_items.c.dlq_id == replay.dlq_id,
                dlq_items.c.replay_count == replay.number,
                # Not pending: it was cancelled after this process had read it. The job exists all the same.
                or_(_PENDING, dlq_items.c.status.in_([DeadLetterStatus.OPEN.value, DeadLetterStatus.REPLAYED.value])),
            )
            .values(status=DeadLetterStatus.REPLAYED.value, replayed_as=replay.new_job_id, replay_pending=0)
        )
    return None


def _find_replay(
    row: Row, key: ReplayKey, now: datetime
) -> Generator[Executable | ClockRead, Any, ReplayReservation | None]:
    """Return the replay of a known key. Raises `ReplayKeyReused` if the key belongs to another request."""
    found = yield select(keys).where(keys.c.tenant_id == row["tenant_id"], keys.c.key == _KEY_PREFIX + key.key)
    if not found:
        return None
    known = found[0]
    if known["expires_at"] is not None and known["expires_at"] <= now:
        yield delete(keys).where(keys.c.tenant_id == known["tenant_id"], keys.c.key == known["key"])
        return None
    if (known["function"], known["fingerprint"]) != (_KEY_FUNCTION, key.fingerprint):
        raise _key_reused(key)
    replay = msgspec.json.decode(known["value"], type=_KnownReplay)
    return msgspec.structs.replace(
        _replay(row),
        new_job_id=replay.job_id,
        number=replay.number,
        pending=bool(row["replay_pending"]) and row["replay_count"] == replay.number,
        duplicate=True,
        previous=replay.previous,
    )


def _keep_key(replay: ReplayReservation, key: ReplayKey, now: datetime) -> Generator[Executable | ClockRead, Any, None]:
    value = msgspec.json.encode(_KnownReplay(replay.new_job_id, replay.number, replay.previous)).decode()
    # Both stores support this form of INSERT.
    kept = yield (
        postgresql_insert(keys)
        .values(
            tenant_id=replay.tenant_id,
            key=_KEY_PREFIX + key.key,
            state=EffectState.DONE.value,
            value=value,
            created_at=now,
            updated_at=now,
            expires_at=now + timedelta(milliseconds=key.window_ms),
            function=_KEY_FUNCTION,
            fingerprint=key.fingerprint,
            token=replay.new_job_id,
            queue=replay.queue,
            job_id=_owner(replay),
            attempt=0,
            worker="",
        )
        .on_conflict_do_nothing()
        .returning(keys.c.key)
    )
    if not kept:
        # Concurrent replays of this dead letter wait for its lock, so it is one of another dead letter.
        raise _key_reused(key)


def _owner(replay: ReplayReservation) -> str:
    """What a key has instead of a job: it does not belong to an attempt of a job."""
    return f"dlq:{replay.dlq_id}:{replay.number}"


def _key_reused(key: ReplayKey) -> ReplayKeyReused:
    return ReplayKeyReused(
        f"idempotency key {key.key!r} was used to replay another dead letter, or with another payload or `again`; "
        "use a new key for another replay"
    )


def _lock(tenants: Sequence[str] | None, dlq_id: str) -> Generator[Executable | ClockRead, Any, Row]:
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
    if values.get("replay_pending"):
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
    return select(dlq_items, *_OF_FAILED_JOB).select_from(dlq_items.outerjoin(jobs, of_job))


def _replay(row: Row) -> ReplayReservation:
    meta, context, payload = _meta(row["meta"]), row["context"], row["replay_payload"]
    return ReplayReservation(
        tenant_id=row["tenant_id"],
        dlq_id=row["dlq_id"],
        job_id=row["job_id"],
        queue=row["queue"],
        job_type=row["job_type"],
        trace_id=row["trace_id"],
        # Of the first job in a chain of replays: effects keyed by it remain the same effects.
        idempotency_key=meta.replay.key if meta.replay is not None else row["idempotency_key"] or row["job_id"],
        context=None if context is None else msgspec.json.decode(context),
        priority=int(Priority.NORMAL) if row["priority"] is None else row["priority"],
        payload=(row["payload"] if payload is None else payload).encode(),
        new_job_id=row["replayed_as"],
        number=row["replay_count"],
        actor=row["requested_by"] or "",
        meta=meta,
    )


def _meta(text: str | None) -> Meta:
    try:
        return decode_meta(text)
    except msgspec.DecodeError:
        # From a foreign message.
        return Meta()
