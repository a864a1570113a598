"""`SqlOperatorStore`, the `OperatorStore` written once for every store.

This module has the transactions on tokens, audit entries, alerts and effects in doubt; those on approvals and dead
letters have their own modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import msgspec
from sqlalchemy import delete, insert, select, update
from sqlalchemy.dialects.postgresql import insert as postgresql_insert

from holdfast.core.announcement import KEEP_MS, AnnouncedTask, newest_first
from holdfast.core.principal import AuditEntry, Role
from holdfast.core.text import clean
from holdfast.errors import Conflict, NotFound
from holdfast.ledger.port.effects import EffectOutcome, EffectState
from holdfast.ledger.port.operators import (
    ApprovalRow,
    OperatorStore,
    PayloadCheck,
    ReplayKey,
    ReplayReservation,
    TokenRow,
)
from holdfast.ledger.transactions import approvals, dead_letters
from holdfast.ledger.transactions.base import (
    NOW,
    Row,
    SqlTransaction,
    TransactionRunner,
    chunks,
    insert_audit,
    json_or_null,
    lock_row,
)
from holdfast.schema import alerts, announced_tasks, tokens
from holdfast.schema import idempotency_keys as keys


def add(token: TokenRow, entry: AuditEntry) -> SqlTransaction[None]:
    if (yield select(tokens.c.token_id).where(tokens.c.token_id == token.token_id)):
        raise Conflict(f"token {token.token_id!r} already exists")
    now = yield NOW
    values = msgspec.structs.asdict(token) | {"role": token.role.value, "tenants": json_or_null(token.tenants)}
    yield insert(tokens).values(**values)
    yield insert_audit([entry], now)
    return None


def one(token_id: str) -> SqlTransaction[TokenRow | None]:
    rows = yield select(tokens).where(tokens.c.token_id == token_id)
    return _token(rows[0]) if rows else None


def every(token_ids: Sequence[str] | None) -> SqlTransaction[list[TokenRow]]:
    query = select(tokens).order_by(tokens.c.created_at, tokens.c.token_id)
    if token_ids is None:
        rows = yield query
        return [_token(row) for row in rows]
    found: list[TokenRow] = []
    for chunk in chunks(token_ids):
        rows = yield query.where(tokens.c.token_id.in_(chunk))
        found += [_token(row) for row in rows]
    return found


def revoke(token_id: str, entry: AuditEntry) -> SqlTransaction[None]:
    rows = yield select(tokens.c.revoked_at).where(tokens.c.token_id == token_id).with_for_update()
    if not rows:
        raise NotFound("token", token_id)
    if rows[0]["revoked_at"] is not None:
        raise Conflict(f"token {token_id!r} is already revoked")
    now = yield NOW
    yield update(tokens).where(tokens.c.token_id == token_id).values(revoked_at=now)
    yield insert_audit([entry], now)
    return None


def _token(row: Row) -> TokenRow:
    values = {**row, "role": Role(row["role"]), "tenants": tuple(msgspec.json.decode(row["tenants"]))}
    return TokenRow(**values)


def record(entries: Sequence[AuditEntry]) -> SqlTransaction[None]:
    if entries:
        now = yield NOW
        yield insert_audit(entries, now)
    return None


def raise_alert(key: str, entry: AuditEntry) -> SqlTransaction[bool]:
    now = yield NOW
    # Both stores support this form of INSERT.
    alert = postgresql_insert(alerts).values(tenant_id=entry.tenant_id, key=key, raised_at=now)
    raised = yield alert.on_conflict_do_nothing().returning(alerts.c.key)
    if raised:
        yield insert_audit([entry], now)
    return bool(raised)


def clear_alert(key: str, entry: AuditEntry) -> SqlTransaction[bool]:
    cleared = yield (
        delete(alerts).where(alerts.c.tenant_id == entry.tenant_id, alerts.c.key == key).returning(alerts.c.key)
    )
    if cleared:
        now = yield NOW
        yield insert_audit([entry], now)
    return bool(cleared)


def announce(tasks: Sequence[AnnouncedTask]) -> SqlTransaction[None]:
    now = yield NOW
    table = announced_tasks
    # In one order, so that two processes that copy at once do not block each other.
    for task in sorted(tasks, key=lambda each: (each.task, each.fingerprint)):
        # Another program may have written it to the engine: no zero bytes, and no time that has not come.
        is_past = 0 < task.seen_at_ms <= now.timestamp() * 1000
        seen_at = datetime.fromtimestamp(task.seen_at_ms / 1000, UTC) if is_past else now
        values = {
            "queue": clean(task.queue),
            "priority": task.priority,
            "schema": clean(task.schema),
            "seen_at": seen_at,
        }
        row = postgresql_insert(table).values(task=clean(task.task), fingerprint=clean(task.fingerprint), **values)
        yield row.on_conflict_do_update(index_elements=[table.c.task, table.c.fingerprint], set_=values)
    names = sorted({clean(task.task) for task in tasks})
    before = now - timedelta(milliseconds=KEEP_MS)
    for chunk in chunks(names):
        yield delete(table).where(table.c.task.in_(chunk), table.c.seen_at < before)
    return None


def announced() -> SqlTransaction[list[AnnouncedTask]]:
    rows = yield select(announced_tasks)
    return newest_first(
        AnnouncedTask(
            task=row["task"],
            fingerprint=row["fingerprint"],
            queue=row["queue"],
            priority=row["priority"],
            schema=row["schema"],
            seen_at_ms=round(row["seen_at"].timestamp() * 1000),
        )
        for row in rows
    )


def resolve(outcome: EffectOutcome, entry: AuditEntry) -> SqlTransaction[None]:
    row = yield from lock_row(keys, keys.c.key, "effect", outcome.key, [outcome.tenant_id])
    if row["token"] != outcome.token or row["state"] == EffectState.DONE.value:
        raise Conflict(f"effect {outcome.key!r} was reserved again or settled meanwhile; check it again and retry")
    now = yield NOW
    here = (keys.c.tenant_id == row["tenant_id"], keys.c.key == row["key"])
    if outcome.state is EffectState.DONE and outcome.value is not None:
        done = {"state": EffectState.DONE.value, "value": outcome.value.decode(), "reason": None, "updated_at": now}
        yield update(keys).where(*here).values(**done, expires_at=None)
    else:
        yield delete(keys).where(*here)
    yield insert_audit([entry], now)
    return None


class SqlOperatorStore(TransactionRunner, OperatorStore):
    """The operator store; subclasses add how transactions are run."""

    async def add_token(self, token: TokenRow, entry: AuditEntry) -> None:
        await self._run(add(token, entry))

    async def token(self, token_id: str) -> TokenRow | None:
        return await self._read(one(token_id))

    async def tokens(self, token_ids: Sequence[str] | None = None) -> list[TokenRow]:
        return await self._read(every(token_ids))

    async def revoke_token(self, token_id: str, entry: AuditEntry) -> None:
        await self._run(revoke(token_id, entry))

    async def vote(
        self, tenants: Sequence[str] | None, approval_id: str, *, actor: str, approve: bool, reason: str
    ) -> ApprovalRow:
        return await self._run(approvals.vote(tenants, approval_id, actor=actor, approve=approve, reason=reason))

    async def withdraw_approval(self, tenant_id: str, approval_id: str, reason: str) -> None:
        await self._run(approvals.withdraw(tenant_id, approval_id, reason))

    async def expire_approvals(self, limit: int) -> list[ApprovalRow]:
        # Every process calls this each second and mostly finds nothing; reading does not block writers.
        if not await self._read(approvals.is_overdue()):
            return []
        return await self._run(approvals.expire(limit))

    async def undelivered_approvals(self, limit: int, after: ApprovalRow | None = None) -> list[ApprovalRow]:
        return await self._read(approvals.find_undelivered(limit, after))

    async def mark_delivered(self, rows: Sequence[ApprovalRow]) -> None:
        await self._run(approvals.mark_delivered(rows))

    async def mark_undelivered(self, queue: str, since_ms: int) -> int:
        return await self._run(approvals.mark_undelivered(queue, since_ms))

    async def request_discard(self, tenants: Sequence[str] | None, dlq_id: str, *, actor: str, reason: str) -> None:
        await self._run(dead_letters.request_discard(tenants, dlq_id, actor=actor, reason=reason))

    async def confirm_discard(self, tenants: Sequence[str] | None, dlq_id: str, *, actor: str) -> None:
        await self._run(dead_letters.confirm_discard(tenants, dlq_id, actor=actor))

    async def keep(self, tenants: Sequence[str] | None, dlq_id: str, *, actor: str, reason: str) -> None:
        await self._run(dead_letters.keep(tenants, dlq_id, actor=actor, reason=reason))

    async def reserve_replay(
        self,
        tenants: Sequence[str] | None,
        dlq_id: str,
        *,
        actor: str,
        reason: str,
        payload: bytes | None,
        check: PayloadCheck | None = None,
        key: ReplayKey | None = None,
        again: bool = False,
    ) -> ReplayReservation:
        transaction = dead_letters.reserve_replay(
            tenants, dlq_id, actor=actor, reason=reason, payload=payload, check=check, key=key, again=again
        )
        return await self._run(transaction)

    async def cancel_replay(self, replay: ReplayReservation, *, actor: str, reason: str) -> None:
        await self._run(dead_letters.cancel_replay(replay, actor=actor, reason=reason))

    async def unsubmitted_replays(self, limit: int, after: ReplayReservation | None = None) -> list[ReplayReservation]:
        return await self._read(dead_letters.find_unsubmitted(limit, after))

    async def mark_submitted(self, replays: Sequence[ReplayReservation]) -> None:
        await self._run(dead_letters.mark_submitted(replays))

    async def announce_tasks(self, tasks: Sequence[AnnouncedTask]) -> None:
        if tasks:
            await self._run(announce(tasks))

    async def announced_tasks(self) -> list[AnnouncedTask]:
        return await self._read(announced())

    async def resolve_effect(self, outcome: EffectOutcome, entry: AuditEntry) -> None:
        await self._run(resolve(outcome, entry))

    async def record_audit(self, entries: Sequence[AuditEntry]) -> None:
        await self._run(record(entries))

    async def raise_alert(self, key: str, entry: AuditEntry) -> bool:
        return await self._run(raise_alert(key, entry))

    async def clear_alert(self, key: str, entry: AuditEntry) -> bool:
        return await self._run(clear_alert(key, entry))
