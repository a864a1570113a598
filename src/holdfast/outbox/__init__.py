"""Outbox: events written in the user's transaction and published by a relay after the commit.

Public: `NewOutboxEvent` and `run_relay`.
"""

from typing import TYPE_CHECKING

from holdfast._exports import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from holdfast.outbox.writer import NewOutboxEvent
    from holdfast.upkeep.relay_service import run_relay

__all__ = ["NewOutboxEvent", "run_relay"]

__getattr__ = _lazy_exports(
    __name__,
    {
        "NewOutboxEvent": "holdfast.outbox.writer",
        "run_relay": "holdfast.upkeep.relay_service",
    },
)
