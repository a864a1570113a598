"""The operators' log, and alerts that stand."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete
from sqlalchemy.dialects.postgresql import insert

from holdfast.ledger.acts.steps import NOW, Act, line
from holdfast.ledger.people import Action
from holdfast.ledger.schema import alerts


def record(actions: Sequence[Action]) -> Act[None]:
    if actions:
        now = yield NOW
        yield line(actions, now)
    return None


def raise_alert(key: str, action: Action) -> Act[bool]:
    now = yield NOW
    # Both stores speak this dialect of INSERT.
    alert = insert(alerts).values(tenant_id=action.tenant_id, key=key, raised_at=now)
    raised = yield alert.on_conflict_do_nothing().returning(alerts.c.key)
    if raised:
        yield line([action], now)
    return bool(raised)


def clear_alert(key: str, action: Action) -> Act[bool]:
    cleared = yield (
        delete(alerts).where(alerts.c.tenant_id == action.tenant_id, alerts.c.key == key).returning(alerts.c.key)
    )
    if cleared:
        now = yield NOW
        yield line([action], now)
    return bool(cleared)
