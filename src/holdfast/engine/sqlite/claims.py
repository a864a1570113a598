"""claim, reclaim, renew, promote: how leases begin, change hands and last."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from holdfast.core.job import Claim, Failure, Lease
from holdfast.core.states import HEARTBEAT_EVENT, State, event_for
from holdfast.core.verdict import POISON_PILL, Answer, DeadLetter, advance
from holdfast.engine.port import Promotion
from holdfast.engine.sqlite.journal import Journal
from holdfast.engine.sqlite.line import READY, head_of_line
from holdfast.engine.sqlite.moves import Move, Moves
from holdfast.engine.sqlite.policy import Policy
from holdfast.engine.sqlite.rows import INSTANT, LEASE_ROWS, NAMES, WORK_ROWS, WorkRow, row_of
from holdfast.engine.sqlite.transaction import Transaction, Value, expect, json_list

_CLAIMED: Final = event_for(State.QUEUED, State.RUNNING)
_RECLAIMED: Final = event_for(State.RUNNING, State.RUNNING)


class Found(msgspec.Struct, frozen=True):
    """What a claim got, how many waiting jobs it put in line on its way, and when to look again (0: when woken)."""

    claims: list[Claim]
    promoted: int
    next_due_at_ms: int
    #: Jobs are in line whose tenant has as many running as it may: look again when one of them ends.
    held_back: bool


class Taken(msgspec.Struct, frozen=True):
    """What a reclaim got, and how many it gave up as poison pills."""

    claims: list[Claim]
    reclaimed: int
    poisoned: int


def claim(
    transaction: Transaction,
    policy: Policy,
    worker: str,
    queues: Sequence[str],
    limit: int,
    turn: int,
    unseen: Sequence[str],
) -> Found:
    """Lease what may run now. Lazy: an idle worker writes nothing (unless a queue has not seen it for long)."""
    now_ms = policy.clock.now_ms()
    ready = transaction.rows("ready", READY, queues=json_list(queues))
    busy = [each for each in ready if each.in_line or (each.next_due_at is not None and each.next_due_at <= now_ms)]
    for queue in unseen:
        transaction.begin()
        transaction.run("see_worker", worker=worker, queue=queue, now=now_ms)
    claims: list[Claim] = []
    promoted, held_back = 0, False
    for each in busy:
        if len(claims) < limit:
            transaction.begin()
            head = head_of_line(transaction, each, limit - len(claims), turn, now_ms)
            promoted += head.promoted
            held_back |= head.held_back
            claims += _claim_rows(transaction, policy, worker, each.queue, head.rows)
    later = [each.next_due_at for each in ready if each.next_due_at is not None and each.next_due_at > now_ms]
    return Found(claims, promoted, min(later, default=0), held_back)


def _claim_rows(
    transaction: Transaction, policy: Policy, worker: str, queue: str, rows: Sequence[WorkRow]
) -> list[Claim]:
    if not rows:
        return []
    journal = Journal(transaction, queue, policy.options)
    claims = start(transaction, policy, journal, worker, queue, rows)
    journal.close()
    return claims


def start(
    transaction: Transaction,
    policy: Policy,
    journal: Journal,
    worker: str,
    queue: str,
    rows: Sequence[WorkRow],
    *,
    early: bool = False,
) -> list[Claim]:
    """From the line, or from the pending list, into a worker's hands; `early`: from wherever they wait."""
    now_ms = policy.clock.now_ms()
    ids = json_list([row.id for row in rows])
    journal.wrote(*transaction.add("start_events", ids=ids, worker=worker, type=_CLAIMED, now=now_ms))
    until = now_ms + policy.options.visibility_timeout_ms
    changed = transaction.run("start", ids=ids, worker=worker, now=now_ms, until=until, early=int(early))
    expect(changed, len(rows), "claim")
    return [row.as_started(queue, worker, now_ms) for row in rows]


def resume(transaction: Transaction, worker: str, queues: Sequence[str], held: Collection[Lease]) -> list[Claim]:
    """What this worker holds, beside what it knows of. Lazy, and writes nothing."""
    claims = [
        row.as_claim(queue)
        for queue in queues
        for row in transaction.rows("leased", WORK_ROWS, queue=queue, worker=worker)
    ]
    return [claim for claim in claims if claim.lease not in held]


def promote(transaction: Transaction, policy: Policy, queues: Sequence[str], limit: int) -> Promotion:
    """Put jobs that are due in line. Lazy."""
    now_ms = policy.clock.now_ms()
    asked = json_list(queues)
    (next_due,) = transaction.rows("next_due", INSTANT, queues=asked)
    count = 0
    if next_due is not None and next_due <= now_ms:
        transaction.begin()
        for queue in queues:
            promoted = transaction.run("promote", queue=queue, now=now_ms, limit=max(0, limit - count))
            if promoted:
                transaction.effects.ready.add(queue)
            count += promoted
        (next_due,) = transaction.rows("next_due", INSTANT, queues=asked)
    return Promotion(count, next_due or 0, now_ms)


def renew(
    transaction: Transaction, policy: Policy, leases: Sequence[Lease], heartbeats: Collection[Lease]
) -> list[Lease]:
    """Push deadlines out; the leases that are lost. Those named in `heartbeats` leave an event."""
    ids = [row_of(lease) for lease in leases]
    rows = {row.id: row for row in transaction.rows("leases", LEASE_ROWS, ids=json_list(ids))}
    lost: list[Lease] = []
    held: dict[int, tuple[Value, ...]] = {}
    beating: dict[str, list[int]] = {}
    for lease, row_id in zip(leases, ids, strict=True):
        row = rows.get(row_id)
        if row is None or row.fence(lease, lease.token) is not Answer.APPLIED:
            lost.append(lease)
        else:
            held[row.id] = (row.id, row.place, row.deliveries, row.worker)
            if lease in heartbeats:
                beating.setdefault(row.queue, []).append(row.id)
    if held:
        until = policy.clock.now_ms() + policy.options.visibility_timeout_ms
        _, count = transaction.bulk("renew", list(held.values()), before=(until,))
        expect(count, len(held), "renew")
    for queue, beats in beating.items():
        _beat(transaction, policy, queue, sorted(set(beats)))
    return lost


def _beat(transaction: Transaction, policy: Policy, queue: str, ids: Sequence[int]) -> None:
    now_ms, listed = policy.clock.now_ms(), json_list(ids)
    journal = Journal(transaction, queue, policy.options)
    journal.wrote(*transaction.add("heartbeat_events", ids=listed, type=HEARTBEAT_EVENT, now=now_ms))
    expect(transaction.run("heartbeat", ids=listed, now=now_ms), len(ids), "heartbeat")
    journal.close()


def reclaim(transaction: Transaction, policy: Policy, worker: str, queues: Sequence[str], limit: int) -> Taken:
    """Take over lost leases and retries due in the pending list. Lazy."""
    now_ms = policy.clock.now_ms()
    taken = Taken([], 0, 0)
    for queue in transaction.rows("any_lost", NAMES, queues=json_list(queues), now=now_ms):
        room = limit - len(taken.claims)
        if room > 0:
            transaction.begin()
            more = _reclaim_from(transaction, policy, worker, queue, room)
            taken = Taken(taken.claims + more.claims, taken.reclaimed + more.reclaimed, taken.poisoned + more.poisoned)
    return taken


def _reclaim_from(transaction: Transaction, policy: Policy, worker: str, queue: str, limit: int) -> Taken:
    now_ms = policy.clock.now_ms()
    rows = transaction.rows("lost", WORK_ROWS, queue=queue, now=now_ms, limit=limit)
    due = [row for row in rows if row.state is not State.RUNNING]
    lost = [row for row in rows if row.state is State.RUNNING]
    poison = [row for row in lost if _lost_leases(row, queue) >= policy.options.max_deliveries]
    lost = [row for row in lost if row not in poison]

    journal = Journal(transaction, queue, policy.options)
    claims = _take_over(transaction, policy, journal, worker, queue, lost) if lost else []
    claims += start(transaction, policy, journal, worker, queue, due) if due else []
    if poison:
        moves = Moves(transaction, policy, queue)
        for row in poison:
            moves.add(_give_up(row, queue, now_ms))
        moves.write(journal)
    journal.close()
    return Taken(claims, len(lost), len(poison))


def _take_over(
    transaction: Transaction, policy: Policy, journal: Journal, worker: str, queue: str, rows: Sequence[WorkRow]
) -> list[Claim]:
    now_ms = policy.clock.now_ms()
    claims = [row.as_reclaimed(queue, worker, now_ms) for row in rows]
    events = [_reclaimed(row, claim) for row, claim in zip(rows, claims, strict=True)]
    journal.wrote(*transaction.bulk("events", events, before=(now_ms,)))
    until = now_ms + policy.options.visibility_timeout_ms
    ids = json_list([row.id for row in rows])
    expect(transaction.run("reclaim", ids=ids, worker=worker, now=now_ms, until=until), len(rows), "reclaim")
    return claims


def _reclaimed(row: WorkRow, claim: Claim) -> tuple[Value, ...]:
    data = {"old_worker": row.worker, "new_worker": claim.lease.worker, "message_id": claim.lease.place}
    return (
        row.id,
        row.last_seq + 1,
        _RECLAIMED,
        row.state.value,
        row.state.value,
        claim.attempt,
        claim.meta.retry_count,
        claim.lease.worker,
        f"the lease of {row.worker} was lost",
        msgspec.json.encode(data).decode(),
    )


def _lost_leases(row: WorkRow, queue: str) -> int:
    """How many leases this job has lost in its life, the present one included."""
    return row.as_claim(queue).meta.lost_leases + row.deliveries


def _give_up(row: WorkRow, queue: str, now_ms: int) -> Move:
    """A job that took its worker down too often (requirement Q7)."""
    claim = row.as_claim(queue)
    count = _lost_leases(row, queue)
    verdict = DeadLetter(
        Failure(POISON_PILL, f"{count} workers lost their lease on this job; the last was {row.worker}")
    )
    # The present lease is lost as well, which `advance` cannot know.
    claim = msgspec.structs.replace(claim, lease=msgspec.structs.replace(claim.lease, deliveries=row.deliveries + 1))
    return Move(
        job=row,
        to=State.DLQ_PENDING,
        meta=advance(claim, verdict, now_ms),
        attempt=row.attempt,
        worker=row.worker or "",
        failure=verdict.failure,
    )
