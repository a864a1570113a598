"""Claims on SQLite: claim, recover_claims, renew, deregister_worker, and the fair selection of tenants.

Tenants with ready jobs are served by weight, and none waits behind the backlog of another. `select_tenants` is pure and
implements start-time fair queueing. Each job a tenant gets moves the tenant ahead on the queue's clock, by less the
greater its weight; the tenant that is least ahead is next. A tenant that returns after a pause starts at the clock's
present time, so it has not saved up any share. A tenant without ready jobs costs the others nothing. The clock is
stored with the queue, so many workers that claim one job each are as fair as one worker that claims many.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

import msgspec

from holdfast.core.job import Claim, Lease, priority_order
from holdfast.core.states import HEARTBEAT_EVENT, State, event_for
from holdfast.core.verdict import SettleResult
from holdfast.engine.port.jobs import MAX_TENANTS
from holdfast.engine.port.operators import TenantControl
from holdfast.engine.sqlite.feed import FeedWriter
from holdfast.engine.sqlite.rows import LEASE_ROWS, WORK_ROWS, WorkRow, row_id_of, tenant_controls
from holdfast.engine.sqlite.store import EngineContext
from holdfast.sqlite.transaction import Transaction, Value, json_list, require_rows

#: What one job of a tenant of weight 1 takes on the queue's clock.
_JOB: Final = 1 << 20
#: So many tenants are remembered to be ahead; one that is forgotten gets a turn too early.
_REMEMBERED: Final = 4 * MAX_TENANTS

_USUAL: Final = TenantControl()


class FairShare(msgspec.Struct, frozen=True, omit_defaults=True):
    """The queue's clock, and who is ahead of it."""

    now: int = 0
    ahead: dict[str, int] = {}
    #: There are more tenants than are looked at in one claim: the next one looks at those after this.
    after: str = ""


class TenantBacklog(msgspec.Struct, array_like=True, frozen=True):
    """One tenant's jobs in one priority: the place of that priority in the order of reading, and how many there are."""

    priority_index: int
    tenant_id: str
    count: int


class Selection(msgspec.Struct, frozen=True):
    """Who gets a job out of which line, one after the other; whose turns come after that."""

    parts: list[tuple[int, str]]
    fair_share: FairShare
    #: Jobs stay in line because their tenant has as many running as it may.
    capped: bool


def select_tenants(
    parts: Sequence[TenantBacklog],
    limit: int,
    turns: FairShare,
    controls: Mapping[str, TenantControl],
    leases: Mapping[str, int],
) -> Selection:
    """The next `limit` turns. Lines go in the order of reading; within one, whoever is least ahead is next."""
    now, ahead = turns.now, dict(turns.ahead)
    room = {
        tenant: max(0, control.concurrency - leases.get(tenant, 0))
        for tenant, control in controls.items()
        if control.concurrency is not None
    }
    picked: list[tuple[int, str]] = []
    held_back = False
    for place in sorted({part.priority_index for part in parts}):
        line = [part for part in parts if part.priority_index == place]
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
    return Selection(picked, FairShare(now, still, turns.after), held_back)


class ReadyQueue(msgspec.Struct, array_like=True, frozen=True):
    """A queue that is not paused, as an idle worker sees it."""

    queue: str
    has_ready: bool
    #: In one priority, so that they have to take turns.
    several_tenants: bool
    tenants: str | None
    next_due_at: int | None


class ClaimCandidates(msgspec.Struct, frozen=True):
    """Jobs to lease, how many waiting ones were put in line for it, and whether a tenant's own limit held some back."""

    rows: list[WorkRow]
    promoted: int = 0
    capped: bool = False


class _ReadyTenants(msgspec.Struct, array_like=True, frozen=True):
    turns: str | None
    parts: list[TenantBacklog]
    leases: list[tuple[str, int]]


READY: Final = msgspec.json.Decoder(list[ReadyQueue])
_IN_LINE: Final = msgspec.json.Decoder(_ReadyTenants)
_SHARES: Final = msgspec.json.Decoder(list[list[WorkRow]])
_TURNS: Final = msgspec.json.Decoder(FairShare)


def next_claimable(transaction: Transaction, ready: ReadyQueue, limit: int, turn: int, now_ms: int) -> ClaimCandidates:
    """The jobs to lease next. If the line is too short, as many as are due and find room in this claim join it.

    While a priority has jobs of one tenant only, there are no turns to take: one statement gives them.
    """
    controls = tenant_controls(ready.tenants)
    order = priority_order(turn)
    limited = any(control.concurrency is not None for control in controls.values())
    fair = ready.several_tenants or limited
    read = _by_turns if fair else _as_they_stand
    head = read(transaction, ready.queue, limit, order, controls)
    if len(head.rows) == limit:
        return head
    promoted = transaction.run("promote", queue=ready.queue, now=now_ms, limit=limit - len(head.rows))
    if not promoted:
        return head
    # Whoever fell due finds room, so that there are no turns to take; but a tenant's limit is theirs, too.
    head = read(transaction, ready.queue, limit, order, controls)
    return ClaimCandidates(head.rows, promoted, head.capped)


def _as_they_stand(
    transaction: Transaction,
    queue: str,
    limit: int,
    order: tuple[int, ...],
    controls: Mapping[str, TenantControl],
) -> ClaimCandidates:
    return ClaimCandidates(transaction.rows("claimable", WORK_ROWS, limit=limit, **_line(queue, order)))


def _by_turns(
    transaction: Transaction,
    queue: str,
    limit: int,
    order: tuple[int, ...],
    controls: Mapping[str, TenantControl],
) -> ClaimCandidates:
    capped = json_list([tenant for tenant, control in controls.items() if control.concurrency is not None])
    asked: dict[str, Value] = {**_line(queue, order), "limit": limit, "window": MAX_TENANTS, "capped": capped}
    seen = transaction.rows("in_line", _IN_LINE, after="", **asked)
    turns = _TURNS.decode(seen.turns) if seen.turns else FairShare()
    parts, after = seen.parts, _last_of_window(seen.parts)
    if after and turns.after:
        # More tenants than one look takes in: go on after those of the last one, and round again.
        later = transaction.rows("in_line", _IN_LINE, **{**asked, "after": turns.after})
        after = _last_of_window(later.parts)
        known = {(part.priority_index, part.tenant_id) for part in later.parts}
        parts = later.parts + ([] if after else [p for p in parts if (p.priority_index, p.tenant_id) not in known])
    picked = select_tenants(parts, limit, msgspec.structs.replace(turns, after=after), controls, dict(seen.leases))
    if not picked.parts:
        return ClaimCandidates([], capped=picked.capped)
    if len(parts) > 1 or seen.turns:
        transaction.run("turns", queue=queue, turns=msgspec.json.encode(picked.fair_share).decode())
    return ClaimCandidates(_rows(transaction, queue, order, picked), capped=picked.capped)


def _rows(transaction: Transaction, queue: str, order: tuple[int, ...], picked: Selection) -> list[WorkRow]:
    """In the order of the turns, so that a worker starts them fairly, too."""
    counts = Counter(picked.parts)
    shares = json_list([(order[place], tenant, count) for (place, tenant), count in counts.items()])
    heads = transaction.rows("in_turn", _SHARES, queue=queue, shares=shares, most=max(counts.values()))
    rows = {part: deque(head) for part, head in zip(counts, heads, strict=True)}
    return [rows[part].popleft() for part in picked.parts]


def _last_of_window(parts: list[TenantBacklog]) -> str:
    """The last tenant of a line of which there may be more; empty if all have been seen."""
    sizes = Counter(part.priority_index for part in parts)
    full = [part.tenant_id for part in parts if sizes[part.priority_index] >= MAX_TENANTS]
    return max(full, default="")


def _line(queue: str, order: tuple[int, ...]) -> dict[str, Value]:
    first, second, third = order
    return {"queue": queue, "first": first, "second": second, "third": third}


_CLAIMED: Final = event_for(State.QUEUED, State.RUNNING)


class ClaimBatch(msgspec.Struct, frozen=True):
    """What a claim got, how many waiting jobs it put in line on its way, and when to look again (0: when woken)."""

    claims: list[Claim]
    promoted: int
    next_due_at_ms: int
    #: Jobs are in line whose tenant has as many running as it may: look again when one of them ends.
    capped: bool


def claim(
    transaction: Transaction,
    policy: EngineContext,
    worker: str,
    queues: Sequence[str],
    limit: int,
    turn: int,
    unseen: Sequence[str],
) -> ClaimBatch:
    """Lease what may run now. Lazy: an idle worker writes nothing (unless a queue has not seen it for long)."""
    now_ms = policy.clock.now_ms()
    ready = transaction.rows("ready", READY, queues=json_list(queues))
    busy = [each for each in ready if each.has_ready or (each.next_due_at is not None and each.next_due_at <= now_ms)]
    for queue in unseen:
        transaction.begin()
        transaction.run("see_worker", worker=worker, queue=queue, now=now_ms)
    claims: list[Claim] = []
    promoted, held_back = 0, False
    for each in busy:
        if len(claims) < limit:
            transaction.begin()
            head = next_claimable(transaction, each, limit - len(claims), turn, now_ms)
            promoted += head.promoted
            held_back |= head.capped
            claims += _claim_rows(transaction, policy, worker, each.queue, head.rows)
    later = [each.next_due_at for each in ready if each.next_due_at is not None and each.next_due_at > now_ms]
    return ClaimBatch(claims, promoted, min(later, default=0), held_back)


def _claim_rows(
    transaction: Transaction, policy: EngineContext, worker: str, queue: str, rows: Sequence[WorkRow]
) -> list[Claim]:
    if not rows:
        return []
    journal = FeedWriter(transaction, queue, policy.options)
    claims = lease_jobs(transaction, policy, journal, worker, queue, rows)
    journal.close()
    return claims


def lease_jobs(
    transaction: Transaction,
    policy: EngineContext,
    journal: FeedWriter,
    worker: str,
    queue: str,
    rows: Sequence[WorkRow],
    *,
    early: bool = False,
) -> list[Claim]:
    """From the line, or from the pending list, into a worker's hands; `early`: from wherever they wait."""
    now_ms = policy.clock.now_ms()
    ids = json_list([row.id for row in rows])
    journal.add_events(*transaction.add("start_events", ids=ids, worker=worker, type=_CLAIMED, now=now_ms))
    until = now_ms + policy.options.visibility_timeout_ms
    changed = transaction.run("start", ids=ids, worker=worker, now=now_ms, until=until, early=int(early))
    require_rows(changed, len(rows), "claim")
    return [row.to_started_claim(queue, worker, now_ms) for row in rows]


def recover_claims(
    transaction: Transaction, worker: str, queues: Sequence[str], held: Collection[Lease]
) -> list[Claim]:
    """What this worker holds, beside what it knows of. Lazy, and writes nothing."""
    claims = [
        row.to_claim(queue)
        for queue in queues
        for row in transaction.rows("leased", WORK_ROWS, queue=queue, worker=worker)
    ]
    return [claim for claim in claims if claim.lease not in held]


def renew(
    transaction: Transaction, policy: EngineContext, leases: Sequence[Lease], heartbeats: Collection[Lease]
) -> list[Lease]:
    """Push deadlines out; the leases that are lost. Those named in `heartbeats` leave an event."""
    ids = [row_id_of(lease) for lease in leases]
    rows = {row.id: row for row in transaction.rows("leases", LEASE_ROWS, ids=json_list(ids))}
    lost: list[Lease] = []
    held: dict[int, tuple[Value, ...]] = {}
    beating: dict[str, list[int]] = {}
    for lease, row_id in zip(leases, ids, strict=True):
        row = rows.get(row_id)
        if row is None or row.fence(lease, lease.token) is not SettleResult.APPLIED:
            lost.append(lease)
        else:
            held[row.id] = (row.id, row.claim_seq, row.deliveries, row.worker)
            if lease in heartbeats:
                beating.setdefault(row.queue, []).append(row.id)
    if held:
        until = policy.clock.now_ms() + policy.options.visibility_timeout_ms
        _, count = transaction.bulk("renew", list(held.values()), before=(until,))
        require_rows(count, len(held), "renew")
    for queue, beats in beating.items():
        _beat(transaction, policy, queue, sorted(set(beats)))
    return lost


def _beat(transaction: Transaction, policy: EngineContext, queue: str, ids: Sequence[int]) -> None:
    now_ms, listed = policy.clock.now_ms(), json_list(ids)
    journal = FeedWriter(transaction, queue, policy.options)
    journal.add_events(*transaction.add("heartbeat_events", ids=listed, type=HEARTBEAT_EVENT, now=now_ms))
    require_rows(transaction.run("heartbeat", ids=listed, now=now_ms), len(ids), "heartbeat")
    journal.close()


def deregister_worker(transaction: Transaction, worker: str, queues: list[str]) -> None:
    for queue in queues:
        transaction.run("forget_worker", worker=worker, queue=queue)
