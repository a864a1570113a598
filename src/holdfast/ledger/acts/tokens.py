"""Tokens: made, listed, revoked."""

from __future__ import annotations

import msgspec
from sqlalchemy import insert, select, update

from holdfast.core.person import Role
from holdfast.errors import Conflict, Unknown
from holdfast.ledger.acts.steps import NOW, Act, Row, as_json, line
from holdfast.ledger.people import Action, TokenRow
from holdfast.ledger.schema import tokens


def add(token: TokenRow, action: Action) -> Act[None]:
    if (yield select(tokens.c.token_id).where(tokens.c.token_id == token.token_id)):
        raise Conflict(f"there is a token {token.token_id!r} already")
    now = yield NOW
    values = msgspec.structs.asdict(token) | {"role": token.role.value, "tenants": as_json(token.tenants)}
    yield insert(tokens).values(**values)
    yield line([action], now)
    return None


def one(token_id: str) -> Act[TokenRow | None]:
    rows = yield select(tokens).where(tokens.c.token_id == token_id)
    return _token(rows[0]) if rows else None


def every() -> Act[list[TokenRow]]:
    rows = yield select(tokens).order_by(tokens.c.created_at, tokens.c.token_id)
    return [_token(row) for row in rows]


def revoke(token_id: str, action: Action) -> Act[None]:
    rows = yield select(tokens.c.revoked_at).where(tokens.c.token_id == token_id).with_for_update()
    if not rows:
        raise Unknown("token", token_id)
    if rows[0]["revoked_at"] is not None:
        raise Conflict(f"token {token_id!r} has been revoked already")
    now = yield NOW
    yield update(tokens).where(tokens.c.token_id == token_id).values(revoked_at=now)
    yield line([action], now)
    return None


def _token(row: Row) -> TokenRow:
    given = {**row, "role": Role(row["role"]), "tenants": tuple(msgspec.json.decode(row["tenants"]))}
    return TokenRow(**given)
