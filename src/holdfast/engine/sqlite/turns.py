"""Whose turn it is: tenants that have jobs in line are served by weight, and none waits behind another's backlog. Pure.

Start-time fair queueing: a job that a tenant gets moves that tenant ahead on the queue's own clock, by less the more it
weighs, and the tenant that is least ahead is next. A tenant that comes back after a rest begins at the clock's present
time: it has no more turns saved up than somebody new, and whoever has nothing in line costs the others nothing. The
clock is kept with the queue, so that many workers that take one job each are as fair as one that takes many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

import msgspec

from holdfast.engine.port import MAX_TENANTS, TenantControl

#: What one job of a tenant of weight 1 takes on the queue's clock.
_JOB: Final = 1 << 20
#: So many tenants are remembered to be ahead; one that is forgotten gets a turn too early.
_REMEMBERED: Final = 4 * MAX_TENANTS

_USUAL: Final = TenantControl()


class Turns(msgspec.Struct, frozen=True, omit_defaults=True):
    """The queue's clock, and who is ahead of it."""

    now: int = 0
    ahead: dict[str, int] = {}
    #: There are more tenants than are looked at in one claim: the next one looks at those after this.
    after: str = ""


class Part(msgspec.Struct, array_like=True, frozen=True):
    """One tenant's jobs in one priority: the place of that priority in the order of reading, and how many there are."""

    place: int
    tenant_id: str
    count: int


class Pick(msgspec.Struct, frozen=True):
    """Who gets a job out of which line, one after the other; whose turns come after that."""

    parts: list[tuple[int, str]]
    turns: Turns
    #: Jobs stay in line because their tenant has as many running as it may.
    held_back: bool


def pick(
    parts: Sequence[Part],
    limit: int,
    turns: Turns,
    controls: Mapping[str, TenantControl],
    leases: Mapping[str, int],
) -> Pick:
    """The next `limit` turns. Lines go in the order of reading; within one, whoever is least ahead is next."""
    now, ahead = turns.now, dict(turns.ahead)
    room = {
        tenant: max(0, control.concurrency - leases.get(tenant, 0))
        for tenant, control in controls.items()
        if control.concurrency is not None
    }
    picked: list[tuple[int, str]] = []
    held_back = False
    for place in sorted({part.place for part in parts}):
        line = [part for part in parts if part.place == place]
        left = [part.count for part in line]
        heap = [(max(now, ahead.get(part.tenant_id, 0)), at) for at, part in enumerate(line)]
        heapify(heap)
        while heap and len(picked) < limit:
            start, at = heappop(heap)
            tenant = line[at].tenant_id
            if room.get(tenant, 1) < 1:
                held_back = True
                continue
            picked.append((place, tenant))
            if tenant in room:
                room[tenant] -= 1
            now = max(now, start)
            ahead[tenant] = start + _JOB // controls.get(tenant, _USUAL).weight
            left[at] -= 1
            if left[at]:
                heappush(heap, (ahead[tenant], at))
    still = {tenant: at for tenant, at in ahead.items() if at > now}
    if len(still) > _REMEMBERED:
        still = dict(sorted(still.items(), key=lambda each: each[1])[-_REMEMBERED:])
    return Pick(picked, Turns(now, still, turns.after), held_back)
