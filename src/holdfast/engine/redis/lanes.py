"""What this process knows of a queue's lanes: which are in use, and whose they are.

Only a hint, so that a script's keys can be declared: the truth is in Redis, and a script that needs a lane which was
not declared says so before it writes anything. What is known is forgotten when it is far more than is in use.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from holdfast.engine.redis.keys import WIDTH

#: So many lanes more than are in use may be declared; knowing them saves asking again for tenants that come and go.
_SPARE: Final = 8
#: Tenants that are remembered; far more than have a lane at a time.
_MAX_TENANTS: Final = 1_000
#: A script that had to see more than the lanes of its tenants is given all of them for so long.
_ALL_S: Final = 60.0


class Lanes:
    """One queue's lanes, as far as they were heard of."""

    def __init__(self) -> None:
        self._in_use: set[int] = set()
        self._by_tenant: dict[str, int] = {}
        self._all_until = 0.0

    def all(self) -> tuple[int, ...]:
        """Every lane that may have jobs."""
        return tuple(self._in_use)

    def of_tenants(self, tenants: Iterable[str]) -> set[int]:
        """Where the next jobs of these tenants may go."""
        known = self._by_tenant
        return {known[tenant] for tenant in tenants if tenant in known} if known else set()

    def for_submission(self, tenants: Iterable[str]) -> Collection[int]:
        """Those of the tenants; all of them while the queue's whole backlog has to be looked at."""
        return self._in_use if self._all_until > time.monotonic() else self.of_tenants(tenants)

    def saw(self, in_use: bytes) -> None:
        """These, and no others, are in use."""
        lanes = {int(lane) for lane in in_use.split()}
        self._in_use = lanes if len(self._in_use) > len(lanes) + _SPARE else self._in_use | lanes

    def learn(self, missing: Sequence[Any]) -> set[int]:
        """From a script's answer, `tenant, lane, …`: the lanes that it needs beside those that were declared."""
        needed: set[int] = set()
        for tenant, lane in zip(missing[::2], missing[1::2], strict=True):
            needed.add(int(lane))
            if tenant:
                if len(self._by_tenant) >= _MAX_TENANTS:
                    self._by_tenant.clear()
                self._by_tenant[tenant.decode("utf-8", "replace")] = int(lane)
            else:
                self._all_until = time.monotonic() + _ALL_S
        self._in_use |= needed
        return needed


def lanes_of(places: Iterable[str]) -> set[int]:
    """The lanes of leases, without lane 0, which need not be declared."""
    lanes = {int(line) // WIDTH for line in {place.partition(":")[0] for place in places}}
    lanes.discard(0)
    return lanes
