"""How many workers and how much memory a trigger will need (requirement T9). Pure: a calculation, not a measurement."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from holdfast.errors import InvalidOption

#: Workers that compute gain nothing beyond so many for each core.
_PER_CORE: Final = 2
_MIB: Final = 2**20
#: The interpreter, and the keys of deduplication, in MB.
_BASE_MB: Final = 100
_KEYS_MB: Final = 50
#: Messages that lie ready for each worker.
_BUFFERED: Final = 100
_RESERVE: Final = 1.5
#: More than any machine, and few enough to be exact.
_MOST: Final = 1e12


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed, in one process or in several."""

    concurrency: int
    #: What the rate would take; more than `concurrency` if the cores are the limit.
    wanted: int
    memory_mb: float
    #: Messages per second that `concurrency` can do.
    rate: float

    @property
    def enough(self) -> bool:
        """Whether one process keeps up."""
        return self.concurrency >= self.wanted

    @property
    def processes(self) -> int:
        """Processes of this size, on machines of their own, that keep up together."""
        return math.ceil(self.wanted / self.concurrency)


def make_plan(
    *, rate: float, seconds_per_message: float, message_bytes: float, cores: int, waiting: bool = False
) -> Plan:
    """For `rate` messages a second; `waiting`: the work waits for others, and does not keep a core busy."""
    for name, value in (("rate", rate), ("seconds per message", seconds_per_message), ("cores", cores)):
        if not 0 < value <= _MOST:
            raise InvalidOption(f"{name} must be more than 0, not {value}")
    if not 0 <= message_bytes <= _MOST:
        raise InvalidOption(f"bytes per message must be 0 or more, not {message_bytes}")
    # 0.1 × 30 is a hair more than 3 in floating point, and would ask for a fourth.
    wanted = max(1, math.ceil(round(rate * seconds_per_message, 9)))
    concurrency = wanted if waiting else min(wanted, _PER_CORE * cores)
    memory_mb = (_BASE_MB + concurrency * _BUFFERED * message_bytes / _MIB + _KEYS_MB) * _RESERVE
    return Plan(concurrency=concurrency, wanted=wanted, memory_mb=memory_mb, rate=concurrency / seconds_per_message)
