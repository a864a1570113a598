"""Queue controls in their hash, and how they are read. Other programs can write to the hash."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from holdfast.engine.port.operators import QueueControl, TenantControl, check_control
from holdfast.engine.port.reads import QueueGate
from holdfast.engine.redis.net.client import Purpose
from holdfast.engine.redis.store import RedisStore
from holdfast.engine.redis.wire import as_dict, encode_json, instant
from holdfast.errors import InvalidOption

_decode_tenants: Final = msgspec.json.Decoder(dict[str, TenantControl]).decode
_match_count: Final = re.compile(rb"\d{1,15}\Z").match
#: Names of limits in the hash. Older releases had only the second, under this name.
_LIMITS: Final = {
    b"max_running": "concurrency",
    b"concurrency": "worker_concurrency",
    b"intake_limit": "intake_limit",
    b"backlog_alert": "backlog_alert",
}


def decode_control(fields: Sequence[bytes]) -> tuple[QueueControl, list[bytes]]:
    """Decode a queue's controls from their hash in Redis.

    Controls that cannot be read count as not set; their names are returned. Other programs can write to the hash.
    """
    values, unreadable = as_dict(fields), list[bytes]()
    limits: dict[str, int] = {}
    for name, limit in _LIMITS.items():
        if value := values.get(name):
            if _match_count(value):
                limits[limit] = int(value)
            else:
                unreadable.append(name)
    tenants: dict[str, TenantControl] = {}
    try:
        tenants = _decode_tenants(values.get(b"tenants") or b"{}")
        check_control(QueueControl(tenants=tenants))
    except (ValueError, RecursionError, InvalidOption):
        tenants = {}
        unreadable.append(b"tenants")
    paused, intake_paused = (values.get(name) == b"1" for name in (b"paused", b"intake_paused"))
    return QueueControl(paused=paused, intake_paused=intake_paused, tenants=tenants, **limits), unreadable


def encode_control(control: QueueControl) -> dict[str, str]:
    """Encode controls for Redis; empty: not set. Equal controls give equal text."""

    def count(value: int | None) -> str:
        return "" if value is None else str(value)

    tenants = {tenant: control.tenants[tenant] for tenant in sorted(control.tenants)}
    return {
        "paused": "1" if control.paused else "",
        "intake_paused": "1" if control.intake_paused else "",
        "max_running": count(control.concurrency),
        "concurrency": count(control.worker_concurrency),
        "intake_limit": count(control.intake_limit),
        "backlog_alert": count(control.backlog_alert),
        "tenants": encode_json(tenants).decode() if tenants else "",
    }


def gate_from(values: Mapping[bytes, bytes], epoch: bytes) -> QueueGate:
    """Decode the gate; `epoch` is empty without a ledger."""
    unverified = values.get(b"unverified")
    return QueueGate(
        epoch.decode(), not epoch or values.get(b"cleared") == epoch, instant(unverified) if unverified else 0
    )


async def read_control(store: RedisStore, queue: str) -> tuple[QueueControl, list[bytes]]:
    """Return the queue's controls, and their hash in Redis."""
    fields = await store.client.call(Purpose.OTHER, b"HGETALL", store.keys(queue).control)
    return control_from(store, queue, fields), fields


def control_from(store: RedisStore, queue: str, fields: Sequence[bytes]) -> QueueControl:
    """Decode the controls; unreadable ones count as not set."""
    control, unreadable = decode_control(fields)
    store.note_unreadable(queue, "control", unreadable)
    return control
