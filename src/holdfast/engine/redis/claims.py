"""Leases on Redis: claim, recover and renew them, and deregister workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import msgspec

from holdfast.core.job import MAX_BATCH, Claim, Lease, priority_order
from holdfast.engine.outage_watch import OUTAGE_LEASES
from holdfast.engine.port import PartialFailure
from holdfast.engine.redis import wire
from holdfast.engine.redis.intake import Adopter, PendingMessage
from holdfast.engine.redis.keys import RETRY_CONSUMER, STREAMS_PER_LANE, WAKE_GROUP, lanes_of
from holdfast.engine.redis.net.client import Purpose
from holdfast.engine.redis.net.errors import ScriptError
from holdfast.engine.redis.store import RedisStore
from holdfast.errors import EngineRefused, EngineUnavailable, QueueUnverified

#: Longest blocking wait: how long a ready job can stay unclaimed if the worker that was woken for it crashes.
_MAX_BLOCK_MS: Final = 5_000
#: The same while a node of a Cluster is unreachable, so that its queues are retried soon.
_OUTAGE_BLOCK_MS: Final = 500
#: Pending entries read per stream, about the most that a worker has; further ones are found by the next call.
_RECOVERY_LIMIT: Final = 10_000
#: Messages read in one step when leases are recovered.
_READ_BATCH: Final = 100


class Claims:
    """Claims, recovers and renews leases."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._adopter = Adopter(store)
        self._round = 0
        #: Queues that yield nothing before a wake entry: paused, or at their concurrency limit.
        self._blocked: set[str] = set()
        #: Queues whose last claim returned fewer jobs than its limit.
        self._short: set[str] = set()

    # claim -----------------------------------------------------------------------------------------

    async def claim(
        self,
        worker: str,
        queues: Sequence[str],
        limit: int,
        wait_ms: int,
        in_flight: Callable[[], Collection[Lease]] | None = None,
    ) -> list[Claim]:
        if in_flight is not None and self._store.outages.apart:
            return await self._claim_on_cluster(worker, queues, limit, wait_ms, in_flight)
        if wait_ms <= 0 or limit <= 0 or not queues:
            return await self._claim_now(worker, queues, limit)
        # After a claim below its limit, only jobs that became ready since can be there, and they end the wait at once.
        came_short = self._short.issuperset(queues)
        self._short.difference_update(queues)
        if not came_short and (claims := await self._claim_now(worker, queues, limit)):
            return claims
        self._short.difference_update(queues)
        wait_ms = min(wait_ms, _MAX_BLOCK_MS, self._store.client.max_block_ms)
        if len(queues) == 1 and not self._store.outages.apart:
            return await self._claim_when_woken(worker, queues[0], limit, wait_ms)
        await self._wait(queues, wait_ms)
        return await self._claim_now(worker, queues, limit)

    async def _claim_when_woken(self, worker: str, queue: str, limit: int, wait_ms: int) -> list[Claim]:
        """Pipeline the claim behind the blocking wait: Redis leases the next job as soon as it is submitted.

        A cancelled wait is closed before any other call: it claims nothing more, and `recover` finds what it claimed.
        """
        self._round += 1
        limit = min(limit, MAX_BATCH)
        streams = self._wait_streams([queue])
        read = (*_blocking(wait_ms), b"STREAMS", *streams, *streams.values())
        call = self._claim_call(worker, queue, limit)
        reply = await self._store.run_after_read(read, wait_ms / 1000, "claim", queue, *call)
        if reply is None:
            return await self._claim_now(worker, [queue], limit)
        claims = await self._claims_from_reply(worker, queue, limit, reply)
        self._store.counters.claimed += len(claims)
        return claims

    async def _claim_now(self, worker: str, queues: Sequence[str], limit: int) -> list[Claim]:
        claims: list[Claim] = []
        self._round += 1

        async def step(queue: str) -> bool:
            free = min(limit - len(claims), MAX_BATCH)
            if free > 0:
                claims.extend(await self._claim_queue(worker, queue, free))
            return True

        # Each round starts at another queue, so that a busy one does not starve the others.
        first = self._round % len(queues) if queues else 0
        ordered = [*queues[first:], *queues[:first]]
        if self._store.outages.apart:
            # Raises for one unreachable queue: without the leases in flight, a lost reply could not be recovered.
            for queue in ordered:
                await step(queue)
        else:
            await self._store.outages.for_each(ordered, step)
        self._store.counters.claimed += len(claims)
        return claims

    async def _claim_on_cluster(
        self, worker: str, queues: Sequence[str], limit: int, wait_ms: int, in_flight: Callable[[], Collection[Lease]]
    ) -> list[Claim]:
        """Claim from all queues whose node answers. Raises if none does."""
        outages = self._store.outages
        claims = await self._claim_reachable(worker, queues, limit, in_flight)
        if claims or wait_ms <= 0 or limit <= 0 or not queues:
            return claims
        reachable = [queue for queue in queues if not outages.is_skipped(queue)]
        most_ms = self._store.client.max_block_ms if len(reachable) == len(queues) else _OUTAGE_BLOCK_MS
        failure: EngineUnavailable | None = None
        try:
            await self._wait(reachable or queues, min(wait_ms, most_ms))
        except EngineRefused:
            raise
        except EngineUnavailable as exc:
            failure = exc  # the next claim shows which queue it affects
        claims = await self._claim_reachable(worker, queues, limit, in_flight)
        if failure is not None and not claims and not any(outages.is_skipped(queue) for queue in reachable):
            raise failure
        return claims

    async def _claim_reachable(
        self, worker: str, queues: Sequence[str], limit: int, in_flight: Callable[[], Collection[Lease]]
    ) -> list[Claim]:
        outages, claims = self._store.outages, list[Claim]()
        self._round += 1

        async def step(queue: str) -> bool | None:
            free = min(limit - len(claims), MAX_BATCH)
            if free <= 0:
                return None
            found: list[Claim] = []
            if outages.may_have_lost_reply(queue):
                # First the claims of lost replies.
                found = await self._recover(worker, queue, in_flight())
                outages.confirm(queue)
            if not found:
                found = await self._claim_queue(worker, queue, free)
                self._store.counters.claimed += len(found)
            claims.extend(found)
            return True

        first = self._round % len(queues) if queues else 0
        await outages.for_each([*queues[first:], *queues[:first]], step)
        return claims

    async def _claim_queue(self, worker: str, queue: str, limit: int) -> list[Claim]:
        call = self._claim_call(worker, queue, limit)
        try:
            reply = await self._store.run_with_lanes(Purpose.CLAIM, "claim", queue, *call)
        except QueueUnverified:
            # Its verification writes a wake entry.
            self._blocked.add(queue)
            return []
        return await self._claims_from_reply(worker, queue, limit, reply)

    def _claim_call(self, worker: str, queue: str, limit: int) -> tuple[list[bytes], list[Any], Collection[int]]:
        store, keys = self._store, self._store.keys(queue)
        names = [*keys.streams, keys.feed, keys.control, keys.wake, keys.workers]
        group, order = store.names.group, priority_order(self._round)
        arguments = [group, worker, limit, store.nonce(), store.feed_limit, WAKE_GROUP, *order, RETRY_CONSUMER]
        return names, arguments, store.lanes(queue).all()

    async def _claims_from_reply(self, worker: str, queue: str, limit: int, reply: list[Any]) -> list[Claim]:
        store = self._store
        if reply[0] == b"paused":
            self._blocked.add(queue)
            return []
        if reply[0] == b"limited":
            self._blocked.add(queue)
        else:
            self._blocked.discard(queue)
        now_ms = int(reply[1])
        store.lanes(queue).set_in_use(reply[2])
        streams = zip(reply[3::2], reply[4::2], strict=True)
        found = [PendingMessage(index, entry, 1) for index, entries in streams for entry in entries]
        claims = await self.parse_claims(worker, queue, found, now_ms)
        if reply[0] == b"nogroup":
            await store.create_groups(queue)
            claims += await self._claim_queue(worker, queue, limit - len(claims))
        elif len(found) < limit:
            self._short.add(queue)
        return claims

    async def _wait(self, queues: Sequence[str], wait_ms: int) -> None:
        """Block on the server until there may be a ready job."""
        served = [queue for queue in queues if not self._store.outages.is_skipped(queue)] or queues
        try:
            await self._store.client.read(Purpose.WAIT, _blocking(wait_ms), self._wait_streams(served), wait_ms / 1000)
        except ScriptError:
            # NOGROUP or UNBLOCKED: the store was wiped meanwhile. Or a key of a queue has another type.
            await self._store.outages.for_each(served, self._create_groups)

    async def _create_groups(self, queue: str) -> bool:
        await self._store.create_groups(queue)
        return True

    def _wait_streams(self, queues: Sequence[str]) -> dict[bytes, bytes]:
        """The streams to wait for.

        For a paused queue, or one at its concurrency limit, only the wake stream: new jobs would end every wait in
        vain. Resuming it, or a free slot, writes a wake entry.
        """
        streams: list[bytes] = []
        for queue in queues:
            keys = self._store.keys(queue)
            streams += (keys.wake,) if queue in self._blocked else (*keys.wake_streams, keys.wake)
        return dict.fromkeys(streams, b">")

    # recover ---------------------------------------------------------------------------------------

    async def recover(self, worker: str, queues: Sequence[str], in_flight: Collection[Lease]) -> list[Claim]:
        unverified: QueueUnverified | None = None

        async def step(queue: str) -> list[Claim]:
            nonlocal unverified
            try:
                claims = await self._recover(worker, queue, in_flight)
            except QueueUnverified as exc:
                unverified = exc
                raise
            self._store.outages.confirm(queue)
            return claims

        found = await self._store.outages.for_each(queues, step)
        if unverified is not None and not self._store.outages.apart:
            # All queues are on one server, so that the others wait as well.
            raise unverified
        return [claim for claims in found.values() for claim in claims]

    async def _recover(self, worker: str, queue: str, in_flight: Collection[Lease]) -> list[Claim]:
        found = await self._own_pending(worker, queue, {lease.token for lease in in_flight if lease.queue == queue})
        claims = await self.parse_claims(worker, queue, found, await self._store.now_ms(queue))
        if not claims:
            return []
        keys = self._store.keys(queue)
        records = await self._store.client.call(Purpose.OTHER, b"MGET", *(keys.job(each.job_id) for each in claims))
        return [merge_record(claim, record) for claim, record in zip(claims, records, strict=True)]

    async def _own_pending(self, worker: str, queue: str, known: Collection[str]) -> list[PendingMessage]:
        """This worker's pending messages, without those whose lease token is known."""
        store = self._store
        rows: list[tuple[int, bytes, int]] = []
        # On the connection of claims, so that the leases of a claim that was cancelled in flight are found here.
        for index, stream in await store.streams_in_use(queue, Purpose.CLAIM):
            command = (b"XPENDING", stream, store.names.group, b"-", b"+", _RECOVERY_LIMIT, worker)
            try:
                pending = await store.client.call(Purpose.CLAIM, *command)
            except ScriptError:
                continue  # no group: nothing was ever claimed from this stream
            for message_id, _, _, deliveries in pending:
                if f"{index}:{message_id.decode()}:{deliveries}:{worker}" not in known:
                    rows.append((index, message_id, deliveries))
        found: list[PendingMessage] = []
        for start in range(0, len(rows), _READ_BATCH):
            found += await self._read_messages(queue, rows[start : start + _READ_BATCH])
        return found

    async def _read_messages(self, queue: str, rows: Sequence[tuple[int, bytes, int]]) -> list[PendingMessage]:
        """The messages of these rows (stream index, message id, delivery count) of the pending lists."""
        store, keys = self._store, self._store.keys(queue)
        arguments = [store.names.group, len(rows), *(part for row in rows for part in row[:2])]
        lanes = {index // STREAMS_PER_LANE for index, *_ in rows} - {0}
        names = [*keys.streams, keys.control]
        entries = await store.run_with_lanes(Purpose.OTHER, "read_messages", queue, names, arguments, lanes)
        return [
            PendingMessage(index, entry, deliveries)
            for (index, _, deliveries), entry in zip(rows, entries, strict=True)
            if entry
        ]

    async def parse_claims(self, worker: str, queue: str, found: Sequence[PendingMessage], now_ms: int) -> list[Claim]:
        """Turn messages into claims; foreign messages are adopted first."""
        claims: list[Claim] = []
        foreign: list[PendingMessage] = []
        for message in found:
            entry = message.entry
            if wire.is_native(entry[1]):
                try:
                    claims.append(
                        wire.parse_entry(entry, message.stream_index, queue, worker, message.deliveries, now_ms)
                    )
                    continue
                except wire.MalformedMessage:
                    pass  # adoption dead-letters the message
            foreign.append(message)
        if foreign:
            claims += await self._adopter.adopt(worker, queue, foreign, now_ms)
        return claims

    # renew -----------------------------------------------------------------------------------------

    async def renew(self, leases: Sequence[Lease], heartbeats: Collection[Lease]) -> list[Lease]:
        lost: list[Lease] = []
        groups: dict[str, dict[str, list[Lease]]] = {}
        for lease in leases:
            groups.setdefault(lease.queue, {}).setdefault(lease.worker, []).append(lease)

        async def step(queue: str) -> bool:
            for worker, group in groups[queue].items():
                for start in range(0, len(group), MAX_BATCH):
                    lost.extend(await self._renew(queue, worker, group[start : start + MAX_BATCH], heartbeats))
            return True

        # On a Cluster, leases of other queues must not expire because one node is unreachable.
        outages = self._store.outages
        try:
            done = await outages.for_each(groups, step, waits=False)
        except EngineUnavailable as exc:
            if isinstance(exc, EngineRefused) or not outages.apart:
                raise
            raise PartialFailure(exc, lost) from exc
        if len(done) < len(groups):
            raise PartialFailure(outages.first_error(queue for queue in groups if queue not in done), lost)
        return lost

    async def _renew(
        self, queue: str, worker: str, leases: Sequence[Lease], heartbeats: Collection[Lease]
    ) -> list[Lease]:
        store, keys = self._store, self._store.keys(queue)
        names = [*keys.streams, keys.feed, keys.control]
        outage_idle_ms = OUTAGE_LEASES * store.options.visibility_timeout_ms
        arguments: list[Any] = [store.names.group, worker, len(leases), store.nonce(), store.feed_limit, outage_idle_ms]
        for lease in leases:
            index, _, message_id = lease.position.partition(":")
            record = 0
            if lease in heartbeats:
                names.append(keys.job(lease.job_id))
                record = len(names)
            arguments += (index, message_id, lease.deliveries, record)
        lanes = lanes_of(lease.position for lease in leases)
        positions = await store.run_with_lanes(Purpose.OTHER, "renew", queue, names, arguments, lanes)
        return [leases[position - 1] for position in positions]

    # deregister ------------------------------------------------------------------------------------

    async def deregister_worker(self, worker: str, queues: Sequence[str]) -> None:
        await self._store.outages.for_each(queues, lambda queue: remove_consumers(self._store, queue, worker, 0))


async def remove_consumers(store: RedisStore, queue: str, worker: str, idle_ms: int) -> int:
    """Deregister a worker that has no leases; return how many consumers were removed.

    `worker` "" is every worker that was idle for `idle_ms`.
    """
    keys = store.keys(queue)
    names, arguments = [*keys.streams, keys.workers, keys.control], [store.names.group, worker, idle_ms, RETRY_CONSUMER]
    return int(
        await store.run_with_lanes(Purpose.OTHER, "remove_consumers", queue, names, arguments, store.lanes(queue).all())
    )


def merge_record(claim: Claim, record: bytes | None) -> Claim:
    """Return the claim with the meta of its record.

    A retry in the pending list cannot change its message, so its record has the current meta, and the deliveries that
    earlier attempts used up. A record that cannot be read is ignored.
    """
    _, _, packed = (record or b"").partition(b"\n")
    known = wire.read_record(packed) if packed else None
    if known is None:
        return claim
    body, meta = known
    # Deliveries that earlier attempts used up are not lost leases.
    meta = msgspec.structs.replace(meta, lost_leases=meta.lost_leases - body.deliveries)
    return msgspec.structs.replace(claim, meta=meta, first_delivery=body.deliveries + 1)


def _blocking(wait_ms: int) -> tuple[Any, ...]:
    """A blocking read that wakes one worker per entry."""
    return (b"XREADGROUP", b"GROUP", WAKE_GROUP, b"any", b"BLOCK", wait_ms, b"COUNT", 1, b"NOACK")
