"""claim, adopt, resume, renew, reclaim, leave: who may run what."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec

from holdfast.core.job import Claim, Lease, read_order
from holdfast.engine.port import MAX_BATCH
from holdfast.engine.redis import wire
from holdfast.engine.redis.client import Lane, ScriptError
from holdfast.engine.redis.keys import PARKING, WAKE_GROUP
from holdfast.engine.redis.store import Store

#: A worker that is woken and dies costs the others at most this long.
_MAX_BLOCK_MS: Final = 5_000
_LINES: Final = 3
#: Adopted in one step; foreign messages are rare and their arguments many.
_ADOPT_BATCH: Final = 100
#: A worker holds at most about this many leases; what lies beyond is found at the next look.
_RESUME_LIMIT: Final = 10_000


class Leases:
    """Hands out, extends and takes over the right to run jobs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = 0
        self._paused: set[str] = set()
        self._cursors: dict[str, list[bytes]] = {}

    # claim -----------------------------------------------------------------------------------------

    async def claim(self, worker: str, queues: Sequence[str], limit: int, wait_ms: int) -> list[Claim]:
        claims = await self._claim_now(worker, queues, limit)
        if claims or wait_ms <= 0 or limit <= 0 or not queues:
            return claims
        await self._wait(queues, min(wait_ms, _MAX_BLOCK_MS))
        return await self._claim_now(worker, queues, limit)

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

    async def _claim_queue(self, worker: str, queue: str, limit: int) -> list[Claim]:
        store = self._store
        keys = store.keys(queue)
        reply = await store.run(
            Lane.CLAIM,
            "claim",
            queue,
            [*keys.streams, keys.feed, keys.control, keys.wake],
            [
                store.names.group,
                worker,
                limit,
                store.nonce(),
                store.options.feed_limit,
                WAKE_GROUP,
                *read_order(self._turn),
            ],
        )
        if reply[0] == b"paused":
            self._paused.add(queue)
            return []
        self._paused.discard(queue)
        now_ms = int(reply[1])
        claims: list[Claim] = []
        foreign: list[tuple[int, Any, int, bytes]] = []
        for line, entries in zip(reply[2::2], reply[3::2], strict=True):
            for entry in entries:
                if wire.is_ours(entry[1]):
                    try:
                        claims.append(wire.parse_entry(entry, line, queue, worker, 1, now_ms))
                        continue
                    except wire.Malformed:
                        pass  # forged: told apart and dead-lettered by adoption
                foreign.append((line, entry, 1, b""))
        if foreign:
            claims += await self._adopt(worker, queue, foreign, now_ms)
        if reply[0] == b"nogroup":
            await store.create_groups(queue)
            claims += await self._claim_queue(worker, queue, limit - len(claims))
        return claims

    async def _wait(self, queues: Sequence[str], wait_ms: int) -> None:
        """Block on the server until there may be work. Paused queues wait for a nudge only, or this would spin."""
        streams: list[bytes] = []
        for queue in queues:
            keys = self._store.keys(queue)
            streams += (keys.wake,) if queue in self._paused else (*keys.streams, keys.wake)
        command = (b"XREADGROUP", b"GROUP", WAKE_GROUP, b"any", b"BLOCK", wait_ms, b"COUNT", 1, b"NOACK", b"STREAMS")
        client = self._store.client
        try:
            await client.call(Lane.WAIT, *command, *streams, *(b">" for _ in streams), blocks_s=wait_ms / 1000)
        except ScriptError:
            # NOGROUP or UNBLOCKED: the store was wiped under us.
            for queue in queues:
                await self._store.create_groups(queue)
        except BaseException:
            # The server still holds this call; the next one must not stand behind it.
            client.drop(Lane.WAIT)
            raise

    # adopt -----------------------------------------------------------------------------------------

    async def _adopt(
        self, worker: str, queue: str, messages: Sequence[tuple[int, Any, int, bytes]], now_ms: int
    ) -> list[Claim]:
        claims: list[Claim] = []
        await self._store.introduce(queue)
        for start in range(0, len(messages), _ADOPT_BATCH):
            part = messages[start : start + _ADOPT_BATCH]
            claims += await self._adopt_part(worker, queue, part, now_ms, keep_ids=True)
        return claims

    async def _adopt_part(
        self, worker: str, queue: str, messages: Sequence[tuple[int, Any, int, bytes]], now_ms: int, *, keep_ids: bool
    ) -> list[Claim]:
        store, keys = self._store, self._store.keys(queue)
        options = store.options
        adoptions = [_Adoption(message, queue, worker, keep_ids, options.payload_limit) for message in messages]
        names = [*keys.streams, keys.feed, keys.result, keys.dlq, keys.dead, keys.control, keys.waiters]
        names += [keys.job(adoption.job_id) for adoption in adoptions]
        arguments: list[Any] = [
            store.names.group,
            worker,
            store.nonce(),
            options.feed_limit,
            len(adoptions),
            options.finished_ttl_ms,
            options.result_limit,
            int(options.ledger),
            int(bool(store.names.stream_dlq)),
        ]
        key_indexes: dict[bytes, int] = {}
        for adoption in adoptions:
            key_index = 0
            if adoption.explicit_key:
                name = keys.idempotency(adoption.body.tenant_id, adoption.explicit_key)
                key_index = key_indexes.setdefault(name, len(adoptions) + len(key_indexes) + 1)
            arguments += adoption.arguments(key_index)
        words = await store.run(Lane.CLAIM, "adopt", queue, [*names, *key_indexes], arguments)
        claims: list[Claim] = []
        clashes: list[tuple[int, Any, int, bytes]] = []
        for adoption, message, word in zip(adoptions, messages, words, strict=True):
            if word == b"adopted" and adoption.claim is not None:
                store.counts.adopted += 1
                claims.append(msgspec.structs.replace(adoption.claim, claimed_at_ms=now_ms))
            elif word == b"clash":
                clashes.append(message)
            elif word == b"dead":
                store.counts.malformed += 1
            elif word == b"duplicate":
                store.counts.skipped += 1
        if clashes:
            # A malformed message under a known job's id is a dead letter under an id of its own.
            await self._adopt_part(worker, queue, clashes, now_ms, keep_ids=False)
        return claims

    # resume ----------------------------------------------------------------------------------------

    async def resume(self, worker: str, queues: Sequence[str], held: Collection[str]) -> list[Claim]:
        claims: list[Claim] = []
        for queue in queues:
            found = await self._own_pending(worker, queue, frozenset(held))
            mine = await self._claims(worker, queue, found, await self._store.now_ms())
            if mine and self._store.parking(queue):
                keys = self._store.keys(queue)
                records = await self._store.client.call(Lane.OTHER, b"MGET", *(keys.job(c.job_id) for c in mine))
                mine = [with_record(claim, record) for claim, record in zip(mine, records, strict=True)]
            claims += mine
        return claims

    async def _own_pending(self, worker: str, queue: str, held: frozenset[str]) -> list[tuple[int, Any, int, bytes]]:
        store, keys = self._store, self._store.keys(queue)
        found: list[tuple[int, Any, int, bytes]] = []
        for line, stream in enumerate(keys.streams):
            command = (b"XPENDING", stream, store.names.group, b"-", b"+", _RESUME_LIMIT, worker)
            try:
                rows = await store.client.call(Lane.OTHER, *command)
            except ScriptError:
                await store.create_groups(queue)
                continue
            for message_id, _, _, deliveries in rows:
                if f"{line}:{message_id.decode()}:{deliveries}:{worker}" in held:
                    continue
                entries = await store.client.call(Lane.OTHER, b"XRANGE", stream, message_id, message_id)
                if entries:
                    found.append((line, entries[0], deliveries, b""))
                else:
                    await store.client.call(Lane.OTHER, b"XACK", stream, store.names.group, message_id)
        return found

    async def _claims(
        self, worker: str, queue: str, found: Sequence[tuple[int, Any, int, bytes]], now_ms: int
    ) -> list[Claim]:
        """Entries that were delivered before, as claims."""
        claims: list[Claim] = []
        foreign: list[tuple[int, Any, int, bytes]] = []
        for line, entry, deliveries, owner in found:
            if wire.is_ours(entry[1]):
                try:
                    claims.append(wire.parse_entry(entry, line, queue, worker, deliveries, now_ms))
                    continue
                except wire.Malformed:
                    pass
            foreign.append((line, entry, deliveries, owner))
        if foreign:
            claims += await self._adopt(worker, queue, foreign, now_ms)
        return claims

    # renew -----------------------------------------------------------------------------------------

    async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        lost: list[Lease] = []
        groups: dict[tuple[str, str], list[Lease]] = {}
        for lease in leases:
            groups.setdefault((lease.queue, lease.worker), []).append(lease)
        for (queue, worker), group in groups.items():
            for start in range(0, len(group), MAX_BATCH):
                lost += await self._renew(queue, worker, group[start : start + MAX_BATCH])
        self._store.counts.leases_lost += len(lost)
        return lost

    async def _renew(self, queue: str, worker: str, leases: Sequence[Lease]) -> list[Lease]:
        arguments: list[Any] = [self._store.names.group, worker, len(leases)]
        for lease in leases:
            line, _, message_id = lease.place.partition(":")
            arguments += (line, message_id, lease.deliveries)
        keys = self._store.keys(queue)
        positions = await self._store.run(Lane.OTHER, "renew", queue, keys.streams, arguments)
        return [leases[position - 1] for position in positions]

    # reclaim ---------------------------------------------------------------------------------------

    async def reclaim(self, worker: str, queue: str, limit: int) -> list[Claim]:
        """Lost leases of one queue: found by one script, taken over by another that has their records declared."""
        store, keys = self._store, self._store.keys(queue)
        lost = await self._lost(queue, limit)
        if not lost:
            return []
        reply = await store.run(
            Lane.OTHER,
            "reclaim",
            queue,
            [*keys.streams, keys.feed, keys.control, *(keys.job(_job_id(fields)) for *_, fields in lost)],
            [
                store.names.group,
                worker,
                store.nonce(),
                store.options.feed_limit,
                store.options.visibility_timeout_ms,
                int(store.has_autoclaim),
                len(lost),
                *(part for row in lost for part in row[:4]),
            ],
        )
        if reply[0] == b"paused":
            return []
        found, records = [], {}
        for position, deliveries, entry, record in zip(reply[2::4], reply[3::4], reply[4::4], reply[5::4], strict=True):
            line, message_id, owner, *_ = lost[position - 1]
            found.append((line, entry, deliveries, owner))
            records[f"{line}:{message_id.decode()}"] = record
        store.counts.reclaimed += len(found)
        claims = await self._claims(worker, queue, found, int(reply[1]))
        return [with_record(claim, records[claim.lease.place]) for claim in claims]

    async def _lost(self, queue: str, limit: int) -> list[tuple[int, bytes, bytes, int, list[bytes]]]:
        """Line, message id, owner, deliveries and fields of leases that were not renewed in time."""
        store = self._store
        cursors = self._cursors.setdefault(queue, [b"-"] * _LINES)
        options = [store.names.group, store.options.visibility_timeout_ms, min(limit, MAX_BATCH)]
        arguments = [*options, int(store.has_autoclaim), PARKING, *cursors]
        reply = await store.run(Lane.OTHER, "lost", queue, store.keys(queue).streams, arguments)
        cursors[:] = reply[:3]
        return list(zip(reply[3::5], reply[4::5], reply[5::5], reply[6::5], reply[7::5], strict=True))

    async def retake(self, worker: str, queue: str, limit: int) -> list[Claim]:
        """Retries of one queue that wait in the pending list and are due."""
        store, keys = self._store, self._store.keys(queue)
        _, _, due = await store.run(Lane.OTHER, "due", queue, [keys.waiting], [limit])
        if not due:
            return []
        reply = await store.run(
            Lane.OTHER,
            "retake",
            queue,
            [
                *keys.streams,
                keys.feed,
                keys.control,
                keys.waiting,
                *(keys.job(job_id.decode()) for job_id in due),
            ],
            [store.names.group, worker, store.nonce(), store.options.feed_limit, len(due), *due],
        )
        if reply[0] == b"paused":
            return []
        now_ms = int(reply[1])
        claims = []
        for line, deliveries, entry, record in zip(reply[2::4], reply[3::4], reply[4::4], reply[5::4], strict=True):
            parse = wire.parse_entry if wire.is_ours(entry[1]) else wire.parse_known
            claims.append(with_record(parse(entry, line, queue, worker, deliveries, now_ms), record))
        store.counts.claimed += len(claims)
        return claims

    async def leave(self, worker: str, queues: Sequence[str]) -> None:
        for queue in queues:
            arguments = [self._store.names.group, worker, 0, PARKING]
            await self._store.run(Lane.OTHER, "leave", queue, self._store.keys(queue).streams, arguments)


class _Adoption:
    """One foreign message on its way to become a job or a dead letter."""

    def __init__(
        self, message: tuple[int, Any, int, bytes], queue: str, worker: str, keep_id: bool, payload_limit: int
    ) -> None:
        self.line, self._entry, self._deliveries, self._owner = message
        self.claim: Claim | None = None
        self._fault, self._dead_letter = b"", b""
        try:
            self.claim = wire.parse_foreign(self._entry, self.line, queue, worker, self._deliveries)
            wire.check_size(self.claim.payload, payload_limit)
            self.job_id = self.claim.job_id
            self.body = wire.claim_body(self.claim, self.claim.meta, 0)
            key = self.claim.idempotency_key
            self.explicit_key = key if key != self.job_id else ""
        except wire.Malformed as reason:
            self.claim = None
            fields = wire.as_dict(self._entry[1])
            failure = wire.malformed(str(reason))
            self.job_id = (wire.usable_id(fields.get(b"task_id")) if keep_id else None) or wire.made_up_id()
            self.body = wire.malformed_body(fields, self._entry[0], self.line, failure)
            self.explicit_key = ""
            self._fault = wire.failure_text(failure).encode()
            letter = wire.dead_letter_fields(self.job_id, self.body, failure, wire.made_up_id())
            self._dead_letter = wire.pack(letter)

    def arguments(self, key_index: int) -> tuple[Any, ...]:
        body = self.body
        return (
            self.line,
            self._entry[0],
            self._deliveries,
            self.job_id,
            self._fault,
            wire.encode_body(body) if self._fault else b"",
            self._dead_letter,
            key_index,
            body.task,
            body.payload,
            body.tenant_id,
            body.idempotency_key or self.job_id,
            body.trace_id,
            body.meta,
            self._owner,
        )


def with_record(claim: Claim, record: bytes | None) -> Claim:
    """The claim with what its record knows better: retries in the pending list cannot change their message."""
    _, _, packed = (record or b"").partition(b"\n")
    if not packed:
        return claim
    body = wire.decode_body(packed)
    meta = wire.meta_from(body.meta)
    # Deliveries of earlier attempts are no lost leases.
    meta = msgspec.structs.replace(meta, lost_leases=meta.lost_leases - body.deliveries)
    return msgspec.structs.replace(claim, meta=meta)


def _job_id(fields: Sequence[bytes]) -> str:
    """The job that a message speaks of, if it speaks of one."""
    return wire.usable_id(wire.as_dict(fields).get(b"task_id")) or ""
