"""control and set_control: an operator's hand on a queue (requirement H5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from holdfast.engine.port import Control, TenantControl, check_control
from holdfast.engine.redis import wire
from holdfast.engine.redis.client import Purpose
from holdfast.engine.redis.store import Store
from holdfast.errors import ControlChanged

#: Controls that change under our eyes this often in a row are being set by someone in a loop.
_TRIES: Final = 20

_decode_tenants: Final = msgspec.json.Decoder(dict[str, TenantControl]).decode


class Hand(NamedTuple):
    """Whose hand it is, and why; and how the operators' log calls what it does (empty: it does not tell)."""

    actor: str
    reason: str
    audit: str = ""

    def log(self, before: Any, after: Any, target: str, target_id: str) -> dict[str, Any]:
        """What the operators' log says."""
        said = {"actor": self.actor, "reason": self.reason, "before": before, "after": after}
        return said | {"target": target, "target_id": target_id}


class Controls:
    """Reads and sets what operators allow."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def get(self, queue: str) -> Control:
        return parse_control(await self._store.client.call(Purpose.OTHER, b"HGETALL", self._store.keys(queue).control))

    async def set(self, queue: str, control: Control, expected: Control | None, hand: Hand) -> None:
        check_control(control)
        await self._store.introduce(queue)
        if expected is not None or not hand.audit:
            if not await self._set(queue, control, expected, hand):
                raise ControlChanged(queue)
            return
        # The log tells what was before: look, and set if it is still so.
        for _ in range(_TRIES):
            if await self._set(queue, control, await self.get(queue), hand):
                return
        raise ControlChanged(queue)

    async def _set(self, queue: str, control: Control, expected: Control | None, hand: Hand) -> bool:
        store, keys = self._store, self._store.keys(queue)
        data = b""
        if hand.audit:
            before, after = msgspec.to_builtins(expected), msgspec.to_builtins(control)
            data = msgspec.json.encode(hand.log(before, after, "queue", queue))
        named = [part for tenant, allowed in control.tenants.items() for part in (tenant, *_limits(allowed))]
        arguments: list[Any] = [store.nonce(), store.feed_limit, hand.audit, data, wire.pack(named)]
        arguments.append(int(expected is not None))
        seen = control_fields(expected or Control())
        for field, value in control_fields(control).items():
            arguments += (field, value, seen[field])
        names = [keys.control, keys.notices, keys.wake, keys.feed, keys.lanes]
        return bool(await store.run(Purpose.OTHER, "control", queue, names, arguments) == b"ok")


def _limits(control: TenantControl) -> tuple[int, int, int]:
    """Weight, concurrency, intake limit as scripts know them."""
    concurrency = -1 if control.concurrency is None else control.concurrency
    return control.weight, concurrency, -1 if control.intake_limit is None else control.intake_limit


def parse_control(fields: Sequence[bytes]) -> Control:
    """A queue's controls as Redis keeps them."""
    values = wire.as_dict(fields)

    def count(name: bytes) -> int | None:
        value = values.get(name)
        return int(value) if value else None

    return Control(
        paused=values.get(b"paused") == b"1",
        intake_paused=values.get(b"intake_paused") == b"1",
        concurrency=count(b"concurrency"),
        intake_limit=count(b"intake_limit"),
        backlog_alert=count(b"backlog_alert"),
        tenants=_decode_tenants(values.get(b"tenants") or b"{}"),
    )


def control_fields(control: Control) -> dict[str, str]:
    """The other way; empty: not set. The same controls give the same text."""

    def count(value: int | None) -> str:
        return "" if value is None else str(value)

    tenants = {tenant: control.tenants[tenant] for tenant in sorted(control.tenants)}
    return {
        "paused": "1" if control.paused else "",
        "intake_paused": "1" if control.intake_paused else "",
        "concurrency": count(control.concurrency),
        "intake_limit": count(control.intake_limit),
        "backlog_alert": count(control.backlog_alert),
        "tenants": wire.encode_json(tenants).decode() if tenants else "",
    }
