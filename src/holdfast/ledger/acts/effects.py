"""A person's word on an effect in doubt."""

from __future__ import annotations

from sqlalchemy import delete, update

from holdfast.errors import Conflict
from holdfast.ledger.acts.steps import NOW, Act, line, locked
from holdfast.ledger.people import Action
from holdfast.ledger.port import KeyState, Outcome
from holdfast.ledger.schema import idempotency_keys as keys


def resolve(outcome: Outcome, action: Action) -> Act[None]:
    row = yield from locked(keys, keys.c.key, "effect", outcome.key, [outcome.tenant_id])
    if row["token"] != outcome.token or row["state"] == KeyState.DONE.value:
        raise Conflict(f"the effect {outcome.key!r} was reserved again, or settled, in this moment; look once more")
    now = yield NOW
    here = (keys.c.tenant_id == row["tenant_id"], keys.c.key == row["key"])
    if outcome.state is KeyState.DONE and outcome.value is not None:
        done = {"state": KeyState.DONE.value, "value": outcome.value.decode(), "reason": None, "updated_at": now}
        yield update(keys).where(*here).values(**done, expires_at=None)
    else:
        yield delete(keys).where(*here)
    yield line([action], now)
    return None
