"""claim, resume, renew, reclaim, leave: who may run what."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import msgspec

from holdfast.core.job import MAX_BATCH, Claim, Lease, priority_order
from holdfast.core.states import State
from holdfast.engine.port import PartialFailure
from holdfast.engine.redis import wire
from holdfast.engine.redis.intake import Adopter, PendingMessage
from holdfast.engine.redis.keys import RETRY_CONSUMER, STREAMS_PER_LANE, WAKE_GROUP, lanes_of
from holdfast.engine.redis.net.client import Purpose, ScriptError
from holdfast.engine.redis.store import RedisStore
from holdfast.errors import EngineRefused, EngineUnavailable, TransitionInvalid, UnknownJob

#: A worker that is woken and dies costs the others at most this long.
_MAX_BLOCK_MS: Final = 5_000
#: While a node of a Cluster is away, its queues are looked at this often.
_AWAY_BLOCK_MS: Final = 500
#: A worker holds at most about this many leases; what lies beyond is found at the next look.
_RESUME_LIMIT: Final = 10_000
#: Looks at retries that are due, of `MAX_BATCH` each, before it is another call's turn.
_RETAKE_PAGES: Final = 20


class Claims:
    """Hands out, extends and takes over the right to run jobs."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._adopter = Adopter(store)
        self._turn = 0
        self._paused: set[str] = set()
        #: Queues whose last claim got all there was.
        self._short: set[str] = set()
        #: Where `lost` goes on in a queue: line, message id, …
        self._cursors: dict[str, list[int | str]] = {}

    # claim -----------------------------------------------------------------------------------------

    async def claim(
        self,
        worker: str,
        queues: Sequence[str],
        limit: int,
        wait_ms: int,
        held: Callable[[], Collection[Lease]] | None = None,
    ) -> list[Claim]:
        if held is not None and self._store.outages.apart:
            return await self._claim_around(worker, queues, limit, wait_ms, held)
        if wait_ms <= 0 or limit <= 0 or not queues:
            return await self._claim_now(worker, queues, limit)
        # After a claim that came short nothing waits but what has come since, and that ends the wait at once.
        came_short = self._short.issuperset(queues)
        self._short.difference_update(queues)
        if not came_short and (claims := await self._claim_now(worker, queues, limit)):
            return claims
        self._short.difference_update(queues)
        wait_ms = min(wait_ms, _MAX_BLOCK_MS)
        if len(queues) == 1 and not self._store.outages.apart:
            return await self._claim_when_woken(worker, queues[0], limit, wait_ms)
        await self._wait(queues, wait_ms)
        return await self._claim_now(worker, queues, limit)

    async def _claim_when_woken(self, worker: str, queue: str, limit: int, wait_ms: int) -> list[Claim]:
        """The claim is sent with the wait and stands behind it: Redis leases the next job right after it was submitted,
        without asking us first. A wait that is given up is closed before anything else is asked: `resume` sees what it
        took, and it takes nothing more."""
        self._turn += 1
        limit = min(limit, MAX_BATCH)
        streams = self._awaited([queue])
        read = (*_blocking(wait_ms), b"STREAMS", *streams, *streams.values())
        call = self._claim_call(worker, queue, limit)
        reply = await self._store.run_after_read(read, wait_ms / 1000, "claim", queue, *call)
        if reply is None:
            return await self._claim_now(worker, [queue], limit)
        claims = await self._granted(worker, queue, limit, reply)
        self._store.counts.claimed += len(claims)
        return claims

    async def _claim_now(self, worker: str, queues: Sequence[str], limit: int) -> list[Claim]:
        claims: list[Claim] = []
        self._turn += 1
        for offset in range(len(queues)):
            room = min(limit - len(claims), MAX_BATCH)
            if room <= 0:
                break
            # Each queue is first in turn, so that none starves behind a busy neighbour.
            queue = queues[(self._turn + offset) % len(queues)]
            claims += await self._claim_queue(worker, queue, room)
        self._store.counts.claimed += len(claims)
        return claims

    async def _claim_around(
        self, worker: str, queues: Sequence[str], limit: int, wait_ms: int, held: Callable[[], Collection[Lease]]
    ) -> list[Claim]:
        """On a Cluster: from all queues whose node answers. Raises if none does."""
        outages = self._store.outages
        claims = await self._claim_there(worker, queues, limit, held)
        if claims or wait_ms <= 0 or limit <= 0 or not queues:
            return claims
        there = [queue for queue in queues if not outages.is_skipped(queue)]
        most_ms = _MAX_BLOCK_MS if len(there) == len(queues) else _AWAY_BLOCK_MS
        failure: EngineUnavailable | None = None
        try:
            await self._wait(there or queues, min(wait_ms, most_ms))
        except EngineRefused:
            raise
        except EngineUnavailable as exc:
            failure = exc  # whose it is, the claim finds out
        claims = await self._claim_there(worker, queues, limit, held)
        if failure is not None and not claims and not any(outages.is_skipped(queue) for queue in there):
            raise failure
        return claims

    async def _claim_there(
        self, worker: str, queues: Sequence[str], limit: int, held: Callable[[], Collection[Lease]]
    ) -> list[Claim]:
        outages, claims = self._store.outages, list[Claim]()
        self._turn += 1

        async def step(queue: str) -> bool | None:
            room = min(limit - len(claims), MAX_BATCH)
            if room <= 0:
                return None
            found: list[Claim] = []
            if outages.may_have_lost_reply(queue):
                # First what its lost replies had granted.
                found = await self._resume(worker, queue, held())
                outages.confirm(queue)
            if not found:
                found = await self._claim_queue(worker, queue, room)
                self._store.counts.claimed += len(found)
            claims.extend(found)
            return True

        first = self._turn % len(queues) if queues else 0
        await outages.for_each([*queues[first:], *queues[:first]], step)
        return claims

    async def _claim_queue(self, worker: str, queue: str, limit: int) -> list[Claim]:
        call = self._claim_call(worker, queue, limit)
        reply = await self._store.run_with_lanes(Purpose.CLAIM, "claim", queue, *call)
        return await self._granted(worker, queue, limit, reply)

    def _claim_call(self, worker: str, queue: str, limit: int) -> tuple[list[bytes], list[Any], Collection[int]]:
        store, keys = self._store, self._store.keys(queue)
        names = [*keys.streams, keys.feed, keys.control, keys.wake, keys.workers]
        group, order = store.names.group, priority_order(self._turn)
        arguments = [group, worker, limit, store.nonce(), store.feed_limit, WAKE_GROUP, *order, RETRY_CONSUMER]
        return names, arguments, store.lanes(queue).all()

    async def _granted(self, worker: str, queue: str, limit: int, reply: list[Any]) -> list[Claim]:
        """The script's reply as claims."""
        store = self._store
        if reply[0] == b"paused":
            self._paused.add(queue)
            return []
        self._paused.discard(queue)
        now_ms = int(reply[1])
        store.lanes(queue).set_in_use(reply[2])
        lines = zip(reply[3::2], reply[4::2], strict=True)
        found = [PendingMessage(line, entry, 1) for line, entries in lines for entry in entries]
        claims = await self._claims(worker, queue, found, now_ms)
        if reply[0] == b"nogroup":
            await store.create_groups(queue)
            claims += await self._claim_queue(worker, queue, limit - len(claims))
        elif len(found) < limit:
            self._short.add(queue)
        return claims

    async def _wait(self, queues: Sequence[str], wait_ms: int) -> None:
        """Block on the server until there may be work."""
        try:
            await self._store.client.read(Purpose.WAIT, _blocking(wait_ms), self._awaited(queues), wait_ms / 1000)
        except ScriptError:
            # NOGROUP or UNBLOCKED: the store was wiped under us.
            for queue in queues:
                await self._store.create_groups(queue)

    def _awaited(self, queues: Sequence[str]) -> dict[bytes, bytes]:
        """The streams to wait for. Of paused queues the nudges only, or this would spin."""
        streams: list[bytes] = []
        for queue in queues:
            keys = self._store.keys(queue)
            streams += (keys.wake,) if queue in self._paused else (*keys.wake_streams, keys.wake)
        return dict.fromkeys(streams, b">")

    # resume ----------------------------------------------------------------------------------------

    async def resume(self, worker: str, queues: Sequence[str], held: Collection[Lease]) -> list[Claim]:
        async def step(queue: str) -> list[Claim]:
            claims = await self._resume(worker, queue, held)
            self._store.outages.confirm(queue)
            return claims

        found = await self._store.outages.for_each(queues, step)
        return [claim for claims in found.values() for claim in claims]

    async def _resume(self, worker: str, queue: str, held: Collection[Lease]) -> list[Claim]:
        found = await self._own_pending(worker, queue, {lease.token for lease in held if lease.queue == queue})
        claims = await self._claims(worker, queue, found, await self._store.now_ms(queue))
        if not claims:
            return []
        keys = self._store.keys(queue)
        records = await self._store.client.call(Purpose.OTHER, b"MGET", *(keys.job(each.job_id) for each in claims))
        return [merge_record(claim, record) for claim, record in zip(claims, records, strict=True)]

    async def _own_pending(self, worker: str, queue: str, held: Collection[str]) -> list[PendingMessage]:
        store = self._store
        found: list[PendingMessage] = []
        # Behind any claim that was cancelled on its way: what it took must be seen here.
        for line, stream in await store.streams_in_use(queue, Purpose.CLAIM):
            command = (b"XPENDING", stream, store.names.group, b"-", b"+", _RESUME_LIMIT, worker)
            try:
                rows = await store.client.call(Purpose.CLAIM, *command)
            except ScriptError:
                continue  # no group: nobody has ever claimed there
            for message_id, _, _, deliveries in rows:
                if f"{line}:{message_id.decode()}:{deliveries}:{worker}" in held:
                    continue
                entries = await store.client.call(Purpose.OTHER, b"XRANGE", stream, message_id, message_id)
                if entries:
                    found.append(PendingMessage(line, entries[0], deliveries))
                else:
                    await store.client.call(Purpose.OTHER, b"XACK", stream, store.names.group, message_id)
        return found

    async def _claims(self, worker: str, queue: str, found: Sequence[PendingMessage], now_ms: int) -> list[Claim]:
        """Messages as claims; those of other programs are adopted first."""
        claims: list[Claim] = []
        foreign: list[PendingMessage] = []
        for delivery in found:
            entry = delivery.entry
            if wire.is_native(entry[1]):
                try:
                    claims.append(
                        wire.parse_entry(entry, delivery.stream_index, queue, worker, delivery.deliveries, now_ms)
                    )
                    continue
                except wire.MalformedMessage:
                    pass  # forged: told apart and dead-lettered by adoption
            foreign.append(delivery)
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

        # On a Cluster the leases of other queues must not run out because one node is gone.
        done = await self._store.outages.for_each(groups, step)
        if len(done) < len(groups):
            raise PartialFailure(self._store.outages.first_error(queue for queue in groups if queue not in done), lost)
        return lost

    async def _renew(
        self, queue: str, worker: str, leases: Sequence[Lease], heartbeats: Collection[Lease]
    ) -> list[Lease]:
        store, keys = self._store, self._store.keys(queue)
        names = [*keys.streams, keys.feed, keys.control]
        arguments: list[Any] = [store.names.group, worker, len(leases), store.nonce(), store.feed_limit]
        for lease in leases:
            line, _, message_id = lease.position.partition(":")
            record = 0
            if lease in heartbeats:
                names.append(keys.job(lease.job_id))
                record = len(names)
            arguments += (line, message_id, lease.deliveries, record)
        lanes = lanes_of(lease.position for lease in leases)
        positions = await store.run_with_lanes(Purpose.OTHER, "renew", queue, names, arguments, lanes)
        return [leases[position - 1] for position in positions]

    # reclaim ---------------------------------------------------------------------------------------

    async def reclaim(self, worker: str, queue: str, limit: int) -> list[Claim]:
        """Lost leases of one queue: found by one script, taken over by another that has their records declared."""
        store, keys = self._store, self._store.keys(queue)
        lost = await self._lost(queue, limit)
        if not lost:
            return []
        reply = await store.run_with_lanes(
            Purpose.OTHER,
            "reclaim",
            queue,
            [*keys.streams, keys.feed, keys.control, *(keys.job(_job_id(fields)) for *_, fields in lost)],
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
            {line // STREAMS_PER_LANE for line, *_ in lost} - {0},
        )
        if reply[0] == b"paused":
            return []
        found, records = [], {}
        for position, deliveries, entry, record in zip(reply[2::4], reply[3::4], reply[4::4], reply[5::4], strict=True):
            line, message_id, owner, *_ = lost[position - 1]
            found.append(PendingMessage(line, entry, deliveries, owner))
            records[f"{line}:{message_id.decode()}"] = record
        store.counts.reclaimed += len(found)
        claims = await self._claims(worker, queue, found, int(reply[1]))
        return [merge_record(claim, records[claim.lease.position]) for claim in claims]

    async def _lost(self, queue: str, limit: int) -> list[tuple[int, bytes, bytes, int, list[bytes]]]:
        """Line, message id, owner, deliveries and fields of leases that were not renewed in time."""
        store, keys = self._store, self._store.keys(queue)
        options = [store.names.group, store.options.visibility_timeout_ms, min(limit, MAX_BATCH)]
        arguments = [*options, int(store.has_autoclaim), RETRY_CONSUMER, wire.pack(self._cursors.get(queue, []))]
        lanes = store.lanes(queue).all()
        names = [*keys.streams, keys.control]
        reply = await store.run_with_lanes(Purpose.OTHER, "lost", queue, names, arguments, lanes)
        self._cursors[queue] = [part if isinstance(part, int) else part.decode() for part in reply[0]]
        return list(zip(reply[1::5], reply[2::5], reply[3::5], reply[4::5], reply[5::5], strict=True))

    async def claim_due_retries(self, worker: str, queue: str, limit: int) -> list[Claim]:
        """Retries of one queue that wait in the pending list and are due.

        Those of a tenant that has no place stay, so the look goes on behind them: there may be others' among them.
        """
        store, keys = self._store, self._store.keys(queue)
        claims: list[Claim] = []
        passed = 0
        for _ in range(_RETAKE_PAGES):
            _, _, due = await store.run(Purpose.OTHER, "due", queue, [keys.pending_retries], [MAX_BATCH, passed])
            taken = await self._retake(worker, queue, due, limit - len(claims)) if due else []
            claims += taken
            passed += len(due) - len(taken)
            if len(due) < MAX_BATCH or len(claims) >= limit:
                break
        return claims

    async def _retake(self, worker: str, queue: str, due: Sequence[bytes], limit: int) -> list[Claim]:
        store, keys = self._store, self._store.keys(queue)
        names = [*keys.streams, keys.feed, keys.control, keys.pending_retries, keys.wake, keys.lanes]
        names += [keys.job(job_id.decode()) for job_id in due]
        arguments = [store.names.group, worker, store.nonce(), store.feed_limit, RETRY_CONSUMER, len(due), limit, *due]
        lanes = store.lanes(queue).all()
        reply = await store.run_with_lanes(Purpose.OTHER, "retake", queue, names, arguments, lanes)
        if reply[0] == b"paused":
            return []
        now_ms = int(reply[1])
        claims = []
        for line, deliveries, entry, record in zip(reply[2::4], reply[3::4], reply[4::4], reply[5::4], strict=True):
            parse = wire.parse_entry if wire.is_native(entry[1]) else wire.parse_adopted
            claims.append(merge_record(parse(entry, line, queue, worker, deliveries, now_ms), record))
        store.counts.claimed += len(claims)
        return claims

    async def take(self, worker: str, queue: str, job_id: str) -> Claim:
        """One job, wherever it waits."""
        store, keys = self._store, self._store.keys(queue)
        names = [
            *keys.streams,
            keys.feed,
            keys.delayed,
            keys.retry,
            keys.pending_retries,
            keys.control,
            keys.wake,
            keys.lanes,
        ]
        names += [keys.workers, keys.job(job_id)]
        arguments = [store.names.group, worker, store.nonce(), store.feed_limit, job_id, RETRY_CONSUMER]
        lanes = store.lanes(queue).all()
        word, *rest = await store.run_with_lanes(Purpose.CLAIM, "take", queue, names, arguments, lanes)
        if word == b"unknown":
            raise UnknownJob(job_id)
        if word == b"illegal":
            store.counts.illegal_moves += 1
            raise TransitionInvalid(job_id, State(rest[0].decode()), State.RUNNING)
        now_ms, line, entry = rest
        store.counts.claimed += 1
        parse = wire.parse_entry if wire.is_native(entry[1]) else wire.parse_adopted
        return parse(entry, line, queue, worker, 1, int(now_ms))

    async def leave(self, worker: str, queues: Sequence[str]) -> None:
        await self._store.outages.for_each(queues, lambda queue: remove_consumers(self._store, queue, worker, 0))


async def remove_consumers(store: RedisStore, queue: str, worker: str, idle_ms: int) -> int:
    """Forget this worker, or ("") all that were idle for so long, unless they hold leases; returns how many."""
    keys = store.keys(queue)
    names, arguments = [*keys.streams, keys.workers, keys.control], [store.names.group, worker, idle_ms, RETRY_CONSUMER]
    return int(await store.run_with_lanes(Purpose.OTHER, "leave", queue, names, arguments, store.lanes(queue).all()))


def merge_record(claim: Claim, record: bytes | None) -> Claim:
    """The claim with what its record knows better: retries in the pending list cannot change their message."""
    _, _, packed = (record or b"").partition(b"\n")
    if not packed:
        return claim
    body = wire.decode_record(packed)
    meta = wire.decode_meta(body.meta)
    # Deliveries of earlier attempts are no lost leases.
    meta = msgspec.structs.replace(meta, lost_leases=meta.lost_leases - body.deliveries)
    return msgspec.structs.replace(claim, meta=meta)


def _blocking(wait_ms: int) -> tuple[Any, ...]:
    """One wake-up for one worker, whoever waits."""
    return (b"XREADGROUP", b"GROUP", WAKE_GROUP, b"any", b"BLOCK", wait_ms, b"COUNT", 1, b"NOACK")


def _job_id(fields: Sequence[bytes]) -> str:
    """The job that a message speaks of, if it speaks of one."""
    return wire.usable_id(wire.as_dict(fields).get(b"task_id")) or ""
