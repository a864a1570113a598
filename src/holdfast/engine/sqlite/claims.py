"""Claims on SQLite: claim, recover, renew and deregister, and the fair selection of tenants.

Tenants with ready jobs are served by weight, and none waits behind the backlog of another. `select_tenants` is pure and
implements start-time fair queueing. Each claimed job moves its tenant ahead on the queue's clock, by a step divided
by its weight; the tenant that is least ahead is next. A tenant that returns after a pause starts at the clock's current
time, so it has not saved up any share. A tenant without ready jobs costs the others nothing. The clock is stored with
the queue, which makes many workers that claim one job each as fair as one worker that claims many.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

import msgspec

from holdfast.core.announcement import KEEP_MS, AnnouncedTask
from holdfast.core.job import Claim, Lease, priority_order
from holdfast.core.states import HEARTBEAT_EVENT, State, event_for
from holdfast.core.verdict import SettleResult
from holdfast.engine.port.jobs import MAX_TENANTS
from holdfast.engine.port.operators import TenantControl
from holdfast.engine.sqlite.feed import FeedWriter
from holdfast.engine.sqlite.rows import LEASE_ROWS, WORK_ROWS, WorkRow, row_id_of, tenant_controls
from holdfast.engine.sqlite.store import EngineContext
from holdfast.sqlite.transaction import Transaction, Value, json_list, require_rows

#: How far one job moves a tenant of weight 1 ahead on the queue's clock.
_JOB: Final = 1 << 20
#: The most tenants stored as ahead of the clock; one that is dropped is served too early.
_MAX_AHEAD: Final = 4 * MAX_TENANTS

_DEFAULT_CONTROL: Final = TenantControl()


class FairShare(msgspec.Struct, frozen=True, omit_defaults=True):
    """The queue's clock, and the tenants that are ahead of it."""

    now: int = 0
    ahead: dict[str, int] = {}
    #: If there are more tenants than one claim reads: the next claim starts after this one.
    after: str = ""


class TenantBacklog(msgspec.Struct, array_like=True, frozen=True):
    """The number of one tenant's ready jobs in one priority.

    `priority_index` is that priority's index in the reading order.
    """

    priority_index: int
    tenant_id: str
    count: int


class Selection(msgspec.Struct, frozen=True):
    """Priority index and tenant of each job to claim, in order; and the clock after that."""

    parts: list[tuple[int, str]]
    fair_share: FairShare
    #: Ready jobs were skipped because their tenant is at its concurrency limit.
    capped: bool


def select_tenants(
    parts: Sequence[TenantBacklog],
    limit: int,
    fair_share: FairShare,
    controls: Mapping[str, TenantControl],
    leases: Mapping[str, int],
) -> Selection:
    """Select the next `limit` jobs, in the reading order of priorities.

    Within a priority, the tenant that is least ahead is next.
    """
    now, ahead = fair_share.now, dict(fair_share.ahead)
    free = {
        tenant: max(0, control.concurrency - leases.get(tenant, 0))
        for tenant, control in controls.items()
        if control.concurrency is not None
    }
    picked: list[tuple[int, str]] = []
    capped = False
    for index in sorted({part.priority_index for part in parts}):
        backlogs = [part for part in parts if part.priority_index == index]
        left = [part.count for part in backlogs]
        heap = [(max(now, ahead.get(part.tenant_id, 0)), at) for at, part in enumerate(backlogs)]
        heapify(heap)
        while heap and len(picked) < limit:
            start, at = heappop(heap)
            tenant = backlogs[at].tenant_id
            if free.get(tenant, 1) < 1:
                capped = True
                continue
            picked.append((index, tenant))
            if tenant in free:
                free[tenant] -= 1
            now = max(now, start)
            ahead[tenant] = start + _JOB // controls.get(tenant, _DEFAULT_CONTROL).weight
            left[at] -= 1
            if left[at]:
                heappush(heap, (ahead[tenant], at))
    still = {tenant: at for tenant, at in ahead.items() if at > now}
    if len(still) > _MAX_AHEAD:
        still = dict(sorted(still.items(), key=lambda each: each[1])[-_MAX_AHEAD:])
    return Selection(picked, FairShare(now, still, fair_share.after), capped)


class ReadyQueue(msgspec.Struct, array_like=True, frozen=True):
    """A queue that is not paused, as a claim reads it."""

    queue: str
    has_ready: bool
    #: Some priority has ready jobs of several tenants, which need fair shares.
    several_tenants: bool
    tenants: str | None
    next_due_at: int | None
    #: How many of its jobs may run at a time; None: no limit.
    concurrency: int | None


class ClaimCandidates(msgspec.Struct, frozen=True):
    """Jobs to lease, and how many due jobs were promoted for that.

    `capped`: the concurrency limit of the queue or of a tenant excluded some.
    """

    rows: list[WorkRow]
    promoted: int = 0
    capped: bool = False


class _ReadyTenants(msgspec.Struct, array_like=True, frozen=True):
    fair_share: str | None
    parts: list[TenantBacklog]
    leases: list[tuple[str, int]]


READY: Final = msgspec.json.Decoder(list[ReadyQueue])
_READY_TENANTS: Final = msgspec.json.Decoder(_ReadyTenants)
_SHARES: Final = msgspec.json.Decoder(list[list[WorkRow]])
_FAIR_SHARE: Final = msgspec.json.Decoder(FairShare)
_COUNT: Final = msgspec.json.Decoder(tuple[int])


def next_claimable(
    transaction: Transaction, ready: ReadyQueue, limit: int, claim_count: int, now_ms: int
) -> ClaimCandidates:
    """The jobs to lease next. If fewer than `limit` are ready, due jobs are promoted to fill this claim.

    While each priority has jobs of one tenant only, no fair shares are needed: one statement reads the jobs.
    """
    if ready.concurrency is not None:
        slots = max(0, ready.concurrency - running_jobs(transaction, ready.queue))
        if slots == 0:
            return ClaimCandidates([], capped=True)
        limit = min(limit, slots)
    controls = tenant_controls(ready.tenants)
    order = priority_order(claim_count)
    limited = any(control.concurrency is not None for control in controls.values())
    fair = ready.several_tenants or limited
    read = _read_fairly if fair else _read_in_order
    head = read(transaction, ready, limit, order, controls)
    if len(head.rows) == limit:
        return head
    promoted = transaction.run("promote", queue=ready.queue, now=now_ms, limit=limit - len(head.rows))
    if not promoted:
        return head
    # All promoted jobs fit into this claim, so they need no fair shares, but a tenant's limit applies to them as well.
    head = read(transaction, ready, limit, order, controls)
    return ClaimCandidates(head.rows, promoted, head.capped)


def running_jobs(transaction: Transaction, queue: str) -> int:
    """How many jobs of the queue run; those of crashed workers count until they are reclaimed or dead-lettered."""
    (count,) = transaction.rows("running_jobs", _COUNT, queue=queue)
    return count


def _read_in_order(
    transaction: Transaction,
    ready: ReadyQueue,
    limit: int,
    order: tuple[int, ...],
    controls: Mapping[str, TenantControl],
) -> ClaimCandidates:
    return ClaimCandidates(transaction.rows("claimable", WORK_ROWS, limit=limit, **_reading_order(ready, order)))


def _read_fairly(
    transaction: Transaction,
    ready: ReadyQueue,
    limit: int,
    order: tuple[int, ...],
    controls: Mapping[str, TenantControl],
) -> ClaimCandidates:
    capped = json_list([tenant for tenant, control in controls.items() if control.concurrency is not None])
    values: dict[str, Value] = {**_reading_order(ready, order), "limit": limit, "window": MAX_TENANTS, "capped": capped}
    first = transaction.rows("ready_tenants", _READY_TENANTS, after="", **values)
    fair_share = _FAIR_SHARE.decode(first.fair_share) if first.fair_share else FairShare()
    parts, after = first.parts, _last_of_window(first.parts)
    if after and fair_share.after:
        # More tenants than one read returns: continue after the last claim's, and wrap around at the end.
        later = transaction.rows("ready_tenants", _READY_TENANTS, **{**values, "after": fair_share.after})
        after = _last_of_window(later.parts)
        known = {(part.priority_index, part.tenant_id) for part in later.parts}
        parts = later.parts + ([] if after else [p for p in parts if (p.priority_index, p.tenant_id) not in known])
    fair_share = msgspec.structs.replace(fair_share, after=after)
    picked = select_tenants(parts, limit, fair_share, controls, dict(first.leases))
    if not picked.parts:
        return ClaimCandidates([], capped=picked.capped)
    if len(parts) > 1 or first.fair_share:
        transaction.run(
            "save_fair_share", queue=ready.queue, fair_share=msgspec.json.encode(picked.fair_share).decode()
        )
    return ClaimCandidates(_rows(transaction, ready.queue, order, picked), capped=picked.capped)


def _rows(transaction: Transaction, queue: str, order: tuple[int, ...], picked: Selection) -> list[WorkRow]:
    """The selected jobs, in the selection's order, so that a worker also starts them fairly."""
    counts = Counter(picked.parts)
    shares = json_list([(order[index], tenant, count) for (index, tenant), count in counts.items()])
    heads = transaction.rows("tenant_candidates", _SHARES, queue=queue, shares=shares, most=max(counts.values()))
    rows = {part: deque(head) for part, head in zip(counts, heads, strict=True)}
    return [rows[part].popleft() for part in picked.parts]


def _last_of_window(parts: list[TenantBacklog]) -> str:
    """The last tenant read of a priority that may have more; empty if all were read."""
    sizes = Counter(part.priority_index for part in parts)
    full = [part.tenant_id for part in parts if sizes[part.priority_index] >= MAX_TENANTS]
    return max(full, default="")


def _reading_order(ready: ReadyQueue, order: tuple[int, ...]) -> dict[str, Value]:
    first, second, third = order
    return {"queue": ready.queue, "concurrency": ready.concurrency, "first": first, "second": second, "third": third}


_CLAIMED: Final = event_for(State.QUEUED, State.RUNNING)


class ClaimBatch(msgspec.Struct, frozen=True):
    """Claimed jobs, how many due jobs were promoted, and when the next one is due (0: none)."""

    claims: list[Claim]
    promoted: int
    next_due_at_ms: int
    #: Ready jobs were skipped because their queue or tenant is at its limit: claim again when one of its leases ends.
    capped: bool


def claim(
    transaction: Transaction,
    policy: EngineContext,
    worker: str,
    queues: Sequence[str],
    limit: int,
    claim_count: int,
    unseen: Sequence[str],
) -> ClaimBatch:
    """Lease jobs that may run now.

    Lazy: an idle worker writes only to be registered in the `unseen` queues.
    """
    now_ms = policy.clock.now_ms()
    ready = transaction.rows("ready_queues", READY, queues=json_list(queues))
    busy = [each for each in ready if each.has_ready or (each.next_due_at is not None and each.next_due_at <= now_ms)]
    for queue in unseen:
        transaction.begin()
        transaction.run("touch_worker", worker=worker, queue=queue, now=now_ms)
    claims: list[Claim] = []
    promoted, capped = 0, False
    for each in busy:
        if len(claims) < limit:
            transaction.begin()
            head = next_claimable(transaction, each, limit - len(claims), claim_count, now_ms)
            promoted += head.promoted
            capped |= head.capped
            claims += _claim_rows(transaction, policy, worker, each.queue, head.rows)
    later = [each.next_due_at for each in ready if each.next_due_at is not None and each.next_due_at > now_ms]
    return ClaimBatch(claims, promoted, min(later, default=0), capped)


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
    """Lease ready jobs, or retries in the pending list, to a worker.

    With `early`, also jobs that are not due.
    """
    now_ms = policy.clock.now_ms()
    ids = json_list([row.id for row in rows])
    journal.add_events(*transaction.add("insert_claimed_events", ids=ids, worker=worker, type=_CLAIMED, now=now_ms))
    until = now_ms + policy.options.visibility_timeout_ms
    changed = transaction.run("lease_jobs", ids=ids, worker=worker, now=now_ms, until=until, early=int(early))
    require_rows(changed, len(rows), "claim")
    return [row.to_started_claim(queue, worker, now_ms) for row in rows]


def recover_claims(
    transaction: Transaction, worker: str, queues: Sequence[str], in_flight: Collection[Lease]
) -> list[Claim]:
    """This worker's leases that are not among those `in_flight`. Lazy, and writes nothing."""
    claims = [
        row.to_claim(queue)
        for queue in queues
        for row in transaction.rows("worker_leases", WORK_ROWS, queue=queue, worker=worker)
    ]
    return [claim for claim in claims if claim.lease not in in_flight]


def renew(
    transaction: Transaction, policy: EngineContext, leases: Sequence[Lease], heartbeats: Collection[Lease]
) -> list[Lease]:
    """Extend leases; returns the lost ones. Each lease in `heartbeats` leaves an event."""
    ids = [row_id_of(lease) for lease in leases]
    rows = {row.id: row for row in transaction.rows("leases_by_id", LEASE_ROWS, ids=json_list(ids))}
    lost: list[Lease] = []
    renewed: dict[int, tuple[Value, ...]] = {}
    beating: dict[str, list[int]] = {}
    for lease, row_id in zip(leases, ids, strict=True):
        row = rows.get(row_id)
        if row is None or row.fence(lease, lease.token) is not SettleResult.APPLIED:
            lost.append(lease)
        else:
            renewed[row.id] = (row.id, row.claim_seq, row.deliveries, row.worker)
            if lease in heartbeats:
                beating.setdefault(row.queue, []).append(row.id)
    if renewed:
        policy.note_outages(transaction, renewed)
        until = policy.clock.now_ms() + policy.options.visibility_timeout_ms
        _, count = transaction.bulk("renew", list(renewed.values()), before=(until,))
        require_rows(count, len(renewed), "renew")
    for queue, beats in beating.items():
        _write_heartbeats(transaction, policy, queue, sorted(set(beats)))
    return lost


def _write_heartbeats(transaction: Transaction, policy: EngineContext, queue: str, ids: Sequence[int]) -> None:
    now_ms, listed = policy.clock.now_ms(), json_list(ids)
    journal = FeedWriter(transaction, queue, policy.options)
    journal.add_events(*transaction.add("insert_heartbeats", ids=listed, type=HEARTBEAT_EVENT, now=now_ms))
    require_rows(transaction.run("add_heartbeat_seq", ids=listed, now=now_ms), len(ids), "heartbeat")
    journal.close()


def deregister_worker(transaction: Transaction, worker: str, queues: list[str]) -> None:
    for queue in queues:
        transaction.run("delete_worker", worker=worker, queue=queue)


def announce_tasks(transaction: Transaction, policy: EngineContext, tasks: list[AnnouncedTask]) -> None:
    """Store tasks as a worker has them; old schemas of the same tasks are deleted."""
    now_ms = policy.clock.now_ms()
    rows = [(each.task, each.fingerprint, each.queue, each.priority, each.schema) for each in tasks]
    transaction.run("announce_tasks", tasks=json_list(rows), now=now_ms)
    names = json_list([each.task for each in tasks])
    transaction.run("delete_old_announcements", tasks=names, before=now_ms - KEEP_MS)
