"""`SqlOperatorStore`, the `OperatorStore` written once for every store, with its smaller transactions.

Here are the transactions on tokens, audit entries, alerts and effects in doubt; those on approvals and dead letters
have their own modules.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import delete, insert, select, update
from sqlalchemy.dialects.postgresql import insert as postgresql_insert

from holdfast.core.principal import AuditEntry, Role
from holdfast.errors import Conflict, NotFound
from holdfast.ledger.port.effects import EffectOutcome, EffectState
from holdfast.ledger.port.operators import ApprovalRow, OperatorStore, ReplayReservation, TokenRow
from holdfast.ledger.transactions import approvals, dead_letters
from holdfast.ledger.transactions.base import (
    NOW,
    Row,
    SqlTransaction,
    TransactionRunner,
    insert_audit,
    json_or_null,
    lock_row,
)
from holdfast.schema import alerts, tokens
from holdfast.schema import idempotency_keys as keys


def add(token: TokenRow, action: AuditEntry) -> SqlTransaction[None]:
    if (yield select(tokens.c.token_id).where(tokens.c.token_id == token.token_id)):
        raise Conflict(f"there is a token {token.token_id!r} already")
    now = yield NOW
    values = msgspec.structs.asdict(token) | {"role": token.role.value, "tenants": json_or_null(token.tenants)}
    yield insert(tokens).values(**values)
    yield insert_audit([action], now)
    return None


def one(token_id: str) -> SqlTransaction[TokenRow | None]:
    rows = yield select(tokens).where(tokens.c.token_id == token_id)
    return _token(rows[0]) if rows else None


def every() -> SqlTransaction[list[TokenRow]]:
    rows = yield select(tokens).order_by(tokens.c.created_at, tokens.c.token_id)
    return [_token(row) for row in rows]


def revoke(token_id: str, action: AuditEntry) -> SqlTransaction[None]:
    rows = yield select(tokens.c.revoked_at).where(tokens.c.token_id == token_id).with_for_update()
    if not rows:
        raise NotFound("token", token_id)
    if rows[0]["revoked_at"] is not None:
        raise Conflict(f"token {token_id!r} has been revoked already")
    now = yield NOW
    yield update(tokens).where(tokens.c.token_id == token_id).values(revoked_at=now)
    yield insert_audit([action], now)
    return None


def _token(row: Row) -> TokenRow:
    given = {**row, "role": Role(row["role"]), "tenants": tuple(msgspec.json.decode(row["tenants"]))}
    return TokenRow(**given)


def record(actions: Sequence[AuditEntry]) -> SqlTransaction[None]:
    if actions:
        now = yield NOW
        yield insert_audit(actions, now)
    return None


def raise_alert(key: str, action: AuditEntry) -> SqlTransaction[bool]:
    now = yield NOW
    # Both stores speak this dialect of INSERT.
    alert = postgresql_insert(alerts).values(tenant_id=action.tenant_id, key=key, raised_at=now)
    raised = yield alert.on_conflict_do_nothing().returning(alerts.c.key)
    if raised:
        yield insert_audit([action], now)
    return bool(raised)


def clear_alert(key: str, action: AuditEntry) -> SqlTransaction[bool]:
    cleared = yield (
        delete(alerts).where(alerts.c.tenant_id == action.tenant_id, alerts.c.key == key).returning(alerts.c.key)
    )
    if cleared:
        now = yield NOW
        yield insert_audit([action], now)
    return bool(cleared)


def resolve(outcome: EffectOutcome, action: AuditEntry) -> SqlTransaction[None]:
    row = yield from lock_row(keys, keys.c.key, "effect", outcome.key, [outcome.tenant_id])
    if row["token"] != outcome.token or row["state"] == EffectState.DONE.value:
        raise Conflict(f"the effect {outcome.key!r} was reserved again, or settled, in this moment; look once more")
    now = yield NOW
    here = (keys.c.tenant_id == row["tenant_id"], keys.c.key == row["key"])
    if outcome.state is EffectState.DONE and outcome.value is not None:
        done = {"state": EffectState.DONE.value, "value": outcome.value.decode(), "reason": None, "updated_at": now}
        yield update(keys).where(*here).values(**done, expires_at=None)
    else:
        yield delete(keys).where(*here)
    yield insert_audit([action], now)
    return None


class SqlOperatorStore(TransactionRunner, OperatorStore):
    """A store says how an act is run."""

    async def add_token(self, token: TokenRow, action: AuditEntry) -> None:
        await self._run(add(token, action))

    async def token(self, token_id: str) -> TokenRow | None:
        return await self._look(one(token_id))

    async def tokens(self) -> list[TokenRow]:
        return await self._look(every())

    async def revoke_token(self, token_id: str, action: AuditEntry) -> None:
        await self._run(revoke(token_id, action))

    async def vote(
        self, tenants: Sequence[str] | None, approval_id: str, *, person: str, approve: bool, reason: str
    ) -> ApprovalRow:
        return await self._run(approvals.vote(tenants, approval_id, person=person, approve=approve, reason=reason))

    async def withdraw_approval(self, tenant_id: str, approval_id: str, reason: str) -> None:
        await self._run(approvals.withdraw(tenant_id, approval_id, reason))

    async def expire_approvals(self, limit: int) -> list[ApprovalRow]:
        # Asked every second by every process: most looks find nothing.
        if not await self._look(approvals.is_overdue()):
            return []
        return await self._run(approvals.expire(limit))

    async def undelivered_approvals(self, limit: int, after: ApprovalRow | None = None) -> list[ApprovalRow]:
        return await self._look(approvals.undelivered(limit, after))

    async def mark_delivered(self, told: Sequence[ApprovalRow]) -> None:
        await self._run(approvals.mark_delivered(told))

    async def mark_undelivered(self, queue: str, since_ms: int) -> int:
        return await self._run(approvals.mark_undelivered(queue, since_ms))

    async def request_discard(self, tenants: Sequence[str] | None, dlq_id: str, *, person: str, reason: str) -> None:
        await self._run(dead_letters.request_discard(tenants, dlq_id, person=person, reason=reason))

    async def confirm_discard(self, tenants: Sequence[str] | None, dlq_id: str, *, person: str) -> None:
        await self._run(dead_letters.confirm_discard(tenants, dlq_id, person=person))

    async def keep(self, tenants: Sequence[str] | None, dlq_id: str, *, person: str, reason: str) -> None:
        await self._run(dead_letters.keep(tenants, dlq_id, person=person, reason=reason))

    async def reserve_replay(
        self,
        tenants: Sequence[str] | None,
        dlq_id: str,
        *,
        person: str,
        reason: str,
        payload: bytes | None,
        expected: int | None = None,
    ) -> ReplayReservation:
        act = dead_letters.reserve_replay(
            tenants, dlq_id, person=person, reason=reason, payload=payload, expected=expected
        )
        return await self._run(act)

    async def cancel_replay(self, replay: ReplayReservation, *, person: str, reason: str) -> None:
        await self._run(dead_letters.cancel_replay(replay, person=person, reason=reason))

    async def unsubmitted_replays(self, limit: int, after: ReplayReservation | None = None) -> list[ReplayReservation]:
        return await self._look(dead_letters.unsubmitted(limit, after))

    async def mark_submitted(self, replays: Sequence[ReplayReservation]) -> None:
        await self._run(dead_letters.mark_submitted(replays))

    async def resolve_effect(self, outcome: EffectOutcome, action: AuditEntry) -> None:
        await self._run(resolve(outcome, action))

    async def record_audit(self, actions: Sequence[AuditEntry]) -> None:
        await self._run(record(actions))

    async def raise_alert(self, key: str, action: AuditEntry) -> bool:
        return await self._run(raise_alert(key, action))

    async def clear_alert(self, key: str, action: AuditEntry) -> bool:
        return await self._run(clear_alert(key, action))
