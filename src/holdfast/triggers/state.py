"""Where a trigger is in its life, and how it is (requirement T4)."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class TriggerState(StrEnum):
    """Where a trigger is in its life."""

    NEW = "new"
    RUNNING = "running"
    PAUSED = "paused"
    #: Something is down that messages would be handed over to; it goes on by itself.
    HOLDING = "holding"
    STOPPING = "stopping"
    STOPPED = "stopped"


class Health(msgspec.Struct, frozen=True):
    """How it is, now. JSON: `msgspec.to_builtins`."""

    #: `healthy`, `paused`, `holding`, `unhealthy` (the broker does not answer) or `stopped`.
    status: str
    running: bool
    adapter_healthy: bool
    active_workers: int
    paused: bool
