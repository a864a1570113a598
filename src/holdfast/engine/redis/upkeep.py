"""Upkeep on Redis: promote, reclaim, prune."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from holdfast.core.job import MAX_BATCH, Claim, Lease
from holdfast.core.verdict import DeadLetter, Release, Settlement, poison_pill
from holdfast.engine.outage_watch import LOST_IN_OUTAGE, OutageWatch
from holdfast.engine.port.jobs import EXPIRY_BATCH, LeaseFilter, Promotion
from holdfast.engine.redis import wire
from holdfast.engine.redis.claims import Claims, merge_record, remove_consumers
from holdfast.engine.redis.intake import PendingMessage
from holdfast.engine.redis.keys import RETRY_CONSUMER, STREAMS_PER_LANE
from holdfast.engine.redis.net.client import Purpose
from holdfast.engine.redis.settlement import Settlements
from holdfast.engine.redis.store import RedisStore

#: Pages of `MAX_BATCH` due retries, and of lost leases, that one call reads.
_RETRY_PAGES: Final = 20
_LOST_PAGES: Final = 20
#: Stream index, message id, owner, delivery count and job id of a lease that was not renewed in time.
_LostRow = tuple[int, bytes, bytes, int, bytes]
#: A consumer that was idle for this many visibility timeouts is dead.
_DEAD_AFTER_TIMEOUTS: Final = 2
_TRIM_BATCH: Final = 1_000


#: With more queues than this, those without anything due or leased are not read in every pass.
_FEW_QUEUES: Final = 64
#: How often such a queue is read for due jobs, whose notice may have been lost; and how long before a due time.
_IDLE_CHECK_S: Final = 30.0
_CHECK_AHEAD_S: Final = 3.0


def _select(queues: Sequence[str], at: Mapping[str, float]) -> Sequence[str]:
    """The queues that are to be read now."""
    if len(queues) <= _FEW_QUEUES:
        return queues
    now = time.monotonic()
    return [queue for queue in queues if at.get(queue, 0.0) <= now]


class EngineUpkeep:
    """Promotes due jobs, reclaims expired leases and prunes what has expired."""

    def __init__(self, store: RedisStore, claims: Claims, settlements: Settlements) -> None:
        self._store = store
        self._claims = claims
        self._settlements = settlements
        #: Where the script `find_expired` continues in a queue: stream index, message id, …
        self._cursors: dict[str, list[int | str]] = {}
        #: Of many queues: when each is read again, for due jobs and for expired leases.
        self._promote_at: dict[str, float] = {}
        self._reclaim_at: dict[str, float] = {}
        #: Queues whose last outage ended within the visibility timeout.
        self._after_outage: set[str] = set()
        #: Queues that had nothing pending at the last look.
        self._without_leases: set[str] = set()
        self.watch = OutageWatch(store.options.settle_ms / 1000)

    # promote ---------------------------------------------------------------------------------------

    async def promote(self, queues: Sequence[str], limit: int) -> Promotion:
        count, next_in_ms, now_ms = 0, -1, 0

        async def step(queue: str) -> bool:
            nonlocal count, next_in_ms, now_ms
            keys, began = self._store.keys(queue), time.monotonic()
            now, due, *members = await self._store.run(
                Purpose.OTHER, "find_due", queue, [keys.delayed, keys.retry], [limit]
            )
            now_ms = int(now)
            # By the clock of the queue's node; on a Cluster the clocks differ slightly.
            if due and (next_in_ms < 0 or int(due) - now_ms < next_in_ms):
                next_in_ms = max(0, int(due) - now_ms)
            # A job that becomes due before that comes with a notice.
            left_s = (int(due) - now_ms) / 1000 - _CHECK_AHEAD_S if due else _IDLE_CHECK_S
            self._promote_at[queue] = began + min(left_s, _IDLE_CHECK_S)
            jobs = [(job_id, name) for ids, name in zip(members, ("delayed", "retry"), strict=True) for job_id in ids]
            if jobs:
                names = [*keys.streams, keys.delayed, keys.retry, keys.control, keys.wake, keys.lanes]
                names += [keys.member_job(job_id) for job_id, _ in jobs]
                arguments = [self._store.names.group, len(jobs), *(part for job in jobs for part in job)]
                lanes = self._store.lanes(queue).all()
                reply = await self._store.run_with_lanes(Purpose.OTHER, "promote", queue, names, arguments, lanes)
                count += reply[0]
                self._store.note_unreadable(queue, "record of job", reply[1:])
            return True

        await self._store.outages.for_each(_select(queues, self._promote_at), step)
        self._store.counters.promoted += count
        return Promotion(count, now_ms + next_in_ms if next_in_ms >= 0 else 0, now_ms)

    # reclaim ---------------------------------------------------------------------------------------

    async def reclaim(
        self, worker: str, queues: Sequence[str], limit: int, only: LeaseFilter | None, retries: int
    ) -> list[Claim]:
        claims: list[Claim] = []
        free_retries = retries

        async def step(queue: str) -> bool | None:
            nonlocal free_retries
            free = limit - len(claims)
            if free <= 0:
                return None
            began = time.monotonic()
            # Regardless of the settings: another process, or this one before a change, may have left retries there.
            if free_retries > 0:
                due = await self._claim_due_retries(worker, queue, min(free, free_retries))
                free_retries -= len(due)
                claims.extend(due)
            free = limit - len(claims)
            if free > 0:
                claims.extend(await self._reclaim(worker, queue, free, only))
            if queue in self._without_leases:
                # A lease that is granted from now on cannot expire before that.
                self._reclaim_at[queue] = began + self._store.options.visibility_timeout_ms / 1000
            else:
                self._reclaim_at.pop(queue, None)
            return True

        await self._store.outages.for_each(_select(queues, self._reclaim_at), step)
        return claims

    async def _reclaim(self, worker: str, queue: str, limit: int, only: LeaseFilter | None) -> list[Claim]:
        """Reclaim expired leases of one queue.

        One script finds them; a second one, which has their records declared as keys, claims them.
        """
        store, keys = self._store, self._store.keys(queue)
        lost = await self._find(queue, limit, only)
        if not lost:
            return []
        reply = await store.run_with_lanes(
            Purpose.OTHER,
            "reclaim",
            queue,
            [
                *keys.streams,
                keys.feed,
                keys.control,
                keys.wake,
                *(keys.job(_usable_id(row)) for row in lost),
            ],
            [
                store.names.group,
                worker,
                store.nonce(),
                store.feed_limit,
                store.options.visibility_timeout_ms,
                int(store.has_autoclaim),
                len(lost),
                *(part for row in lost for part in row[:4]),
            ],
            {index // STREAMS_PER_LANE for index, *_ in lost} - {0},
        )
        if reply[0] == b"paused":
            return []
        found, records = [], {}
        for position, deliveries, entry, record in zip(reply[2::4], reply[3::4], reply[4::4], reply[5::4], strict=True):
            index, message_id, owner, *_ = lost[position - 1]
            found.append(PendingMessage(index, entry, deliveries, owner))
            records[f"{index}:{message_id.decode()}"] = record
        store.counters.reclaimed += len(found)
        claims = await self._claims.parse_claims(worker, queue, found, int(reply[1]))
        claims = [merge_record(claim, records[claim.lease.position]) for claim in claims]
        if reply[0] == b"outage":
            claims = await self._without_survived(claims, {f"{row[0]}:{row[1].decode()}": row for row in lost})
        return await self.without_poison(claims)

    async def _without_survived(self, claims: list[Claim], lost: Mapping[str, _LostRow]) -> list[Claim]:
        """Release jobs whose leases expired in an outage, so that the loss does not count; return the other claims."""
        counted, survived = list[Claim](), list[Settlement]()
        for claim in claims:
            if self.watch.has_ended(_lease_of(claim.queue, lost[claim.lease.position])):
                counted.append(claim)
            else:
                survived.append(Settlement(claim, Release(LOST_IN_OUTAGE), claim.claimed_at_ms))
        if survived:
            await self._settlements.settle(survived)
        return counted

    async def _find(self, queue: str, limit: int, only: LeaseFilter | None) -> list[_LostRow]:
        """Lost leases; after an outage only those of workers that have certainly ended."""
        if self._must_wait(queue):
            return await self._find_only(queue, limit, self.watch.only_ended(only)) if self.watch.ended else []
        if only is None:
            found = await self._find_lost(queue, limit)
        else:
            found = await self._find_only(queue, limit, self._or_lost_in_outage(queue, only))
        # This call may have waited for a server that had stopped.
        return [] if found and self._must_wait(queue) else found

    def _or_lost_in_outage(self, queue: str, only: LeaseFilter) -> LeaseFilter:
        """A filter for leases that `only` allows, or that an outage may have cost: those are released."""
        return lambda lease: (queue in self._after_outage and not self.watch.has_ended(lease)) or only(lease)

    def _must_wait(self, queue: str) -> bool:
        return self.watch.must_wait(queue, self._store.client.contact(self._store.keys(queue).control))

    async def _find_only(self, queue: str, limit: int, only: LeaseFilter) -> list[_LostRow]:
        """The first `limit` lost leases that `only` allows, from where the last search ended."""
        chosen: list[_LostRow] = []
        for _ in range(_LOST_PAGES):
            found = await self._find_lost(queue, MAX_BATCH)
            chosen += [row for row in found if only(_lease_of(queue, row))]
            if len(chosen) >= limit or len(found) < MAX_BATCH:
                break
        return chosen[:limit]

    async def _find_lost(self, queue: str, limit: int) -> list[_LostRow]:
        """Up to `limit` leases that were not renewed in time, from where the last call ended."""
        store, keys = self._store, self._store.keys(queue)
        options = [store.names.group, store.options.visibility_timeout_ms, min(limit, MAX_BATCH)]
        arguments = [*options, int(store.has_autoclaim), RETRY_CONSUMER, wire.pack(self._cursors.get(queue, []))]
        lanes = store.lanes(queue).all()
        names = [*keys.streams, keys.control]
        reply = await store.run_with_lanes(Purpose.OTHER, "find_expired", queue, names, arguments, lanes)
        self._cursors[queue] = [part if isinstance(part, int) else part.decode() for part in reply[0]]
        (self._without_leases.discard if reply[1] else self._without_leases.add)(queue)
        (self._after_outage.add if reply[2] else self._after_outage.discard)(queue)
        return list(zip(reply[3::5], reply[4::5], reply[5::5], reply[6::5], reply[7::5], strict=True))

    async def _claim_due_retries(self, worker: str, queue: str, limit: int) -> list[Claim]:
        """Claim due retries in the pending list of one queue.

        A retry without a free slot (of its tenant, or of the queue) becomes ready instead, so that it waits with other
        ready jobs for one: at the next call they may have taken all slots again.
        """
        store, keys = self._store, self._store.keys(queue)
        claims: list[Claim] = []
        for _ in range(_RETRY_PAGES):
            _, _, due = await store.run(Purpose.OTHER, "find_due", queue, [keys.pending_retries], [MAX_BATCH])
            claims += await self._claim_retries(worker, queue, due, limit - len(claims)) if due else []
            if len(due) < MAX_BATCH or len(claims) >= limit:
                break
        return claims

    async def _claim_retries(self, worker: str, queue: str, due: Sequence[bytes], limit: int) -> list[Claim]:
        store, keys = self._store, self._store.keys(queue)
        names = [*keys.streams, keys.feed, keys.control, keys.pending_retries, keys.wake, keys.lanes]
        names += [keys.member_job(job_id) for job_id in due]
        arguments = [store.names.group, worker, store.nonce(), store.feed_limit, RETRY_CONSUMER, len(due), limit, *due]
        lanes = store.lanes(queue).all()
        reply = await store.run_with_lanes(Purpose.OTHER, "claim_due_retries", queue, names, arguments, lanes)
        if reply[0] == b"paused":
            return []
        now_ms = int(reply[1])
        store.note_unreadable(queue, "record of job", reply[2])
        claims: list[Claim] = []
        for index, deliveries, entry, record in zip(reply[3::4], reply[4::4], reply[5::4], reply[6::4], strict=True):
            parse = wire.parse_entry if wire.is_native(entry[1]) else wire.parse_adopted
            try:
                claims.append(merge_record(parse(entry, index, queue, worker, deliveries, now_ms), record))
            except wire.MalformedMessage:
                # Adoption dead-letters the message.
                malformed = [PendingMessage(index, entry, deliveries)]
                claims += await self._claims.parse_claims(worker, queue, malformed, now_ms)
        store.counters.claimed += len(claims)
        return claims

    async def without_poison(self, claims: list[Claim]) -> list[Claim]:
        """Dead-letter poison pills (requirement Q7); return the other claims."""
        healthy, poison = [], []
        for claim in claims:
            if claim.lost_alone < self._store.options.max_deliveries:
                healthy.append(claim)
                continue
            failure = poison_pill(claim.lost_alone)
            poison.append(Settlement(claim, DeadLetter(failure), claim.claimed_at_ms))
        if poison:
            await self._settlements.settle(poison)
            self._store.counters.poisoned += len(poison)
        return healthy

    async def expire_leases(self, worker: str, queues: Sequence[str]) -> int:
        self.watch.note_ended(worker)

        async def step(queue: str) -> int:
            store, keys = self._store, self._store.keys(queue)
            arguments = [store.names.group, worker, store.options.visibility_timeout_ms, EXPIRY_BATCH]
            lanes = store.lanes(queue).all()
            names = [*keys.streams, keys.control]
            count: int = await store.run_with_lanes(Purpose.OTHER, "expire_leases", queue, names, arguments, lanes)
            # Another process may have let them expire: this one does not skip the queue either.
            self._reclaim_at.pop(queue, None)
            return count

        return sum((await self._store.outages.for_each(queues, step)).values())

    # prune -----------------------------------------------------------------------------------------

    async def prune(self, queues: Sequence[str]) -> int:
        return sum((await self._store.outages.for_each(queues, self._prune)).values())

    async def _prune(self, queue: str) -> int:
        store = self._store
        keys, now_ms = store.keys(queue), await store.now_ms(queue)
        oldest_result = max(0, now_ms - store.options.result_ttl_ms)
        oldest_entry = f"{max(0, now_ms - store.options.finished_ttl_ms)}-0"
        count = await self._trim(keys.result, f"{oldest_result}-0")
        if store.options.ledger:
            # The ledger has these dead letters: an entry is added only after the ledger has recorded it.
            count += await self._trim(keys.dlq, f"{max(0, now_ms - store.options.dlq_ttl_ms)}-0")
        else:
            arguments = [oldest_entry, int(store.has_autoclaim)]
            count += await store.run(Purpose.OTHER, "trim_detached_feed", queue, [keys.control, keys.feed], arguments)
        max_idle_ms = _DEAD_AFTER_TIMEOUTS * store.options.visibility_timeout_ms
        return count + await remove_consumers(store, queue, "", max_idle_ms)

    async def _trim(self, stream: bytes, position: str) -> int:
        """Delete the entries before a position; return how many."""
        call = self._store.client.call
        if self._store.has_autoclaim:
            return int(await call(Purpose.OTHER, b"XTRIM", stream, b"MINID", position))
        count = 0
        while True:
            entries = await call(Purpose.OTHER, b"XRANGE", stream, b"-", position, b"COUNT", _TRIM_BATCH)
            old = [entry[0] for entry in entries if entry[0] != position.encode()]
            if not old:
                return count
            count += await call(Purpose.OTHER, b"XDEL", stream, *old)


def _lease_of(queue: str, row: _LostRow) -> Lease:
    index, message_id, owner, deliveries, _ = row
    return Lease(queue, _usable_id(row), f"{index}:{message_id.decode()}", deliveries, wire.printable(owner))


def _usable_id(row: _LostRow) -> str:
    """The job id in the message; empty if it has no usable one."""
    return wire.usable_id(row[4]) or ""
