"""Broker clients, shared by triggers (messages in) and the outbox (events out).

Public: the broker in memory, for tests and trials.
"""

from typing import TYPE_CHECKING

from holdfast._exports import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from holdfast.brokers.memory import MemoryBroker, MemoryConfig, MockQueueAdapter

__all__ = ["MemoryBroker", "MemoryConfig", "MockQueueAdapter"]

__getattr__ = _lazy_exports(
    __name__,
    {
        "MockQueueAdapter": "holdfast.brokers.memory",
        "MemoryBroker": "holdfast.brokers.memory",
        "MemoryConfig": "holdfast.brokers.memory",
    },
)
