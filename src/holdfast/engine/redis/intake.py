"""Submission of jobs, and adoption of messages that other programs wrote (requirement Q3).

`Intake.submit` runs one script per queue and batch. After a lost connection it sends the batch a second time: the job
ids make a second copy harmless.

`Adopter.adopt` turns foreign messages into jobs, or into dead letters with the reason. It is a second step after the
claim, because every key that a script touches must be declared and the names of the records are not known before. If
the worker is killed in between, the message stays in the pending list and is reclaimed from there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, Final

import msgspec

from holdfast.core.job import DEFAULT_TENANT, EMPTY_META, MAX_BATCH, Claim, Envelope, KeyReuse, Priority, Receipt
from holdfast.engine.port.jobs import (
    FEED_BEHIND,
    FEED_DETACHED,
    INTAKE_PAUSED,
    EngineOptions,
    JobRefused,
    possible_owners,
)
from holdfast.engine.redis import wire
from holdfast.engine.redis.keys import RETRY_CONSUMER, STREAMS_PER_LANE, QueueKeys
from holdfast.engine.redis.net.client import Purpose
from holdfast.engine.redis.net.errors import ConnectionLost
from holdfast.engine.redis.store import RedisStore
from holdfast.errors import (
    EngineUnavailable,
    FeedDetached,
    FeedFull,
    IdempotencyKeyReused,
    IntakeLimited,
    IntakeRefused,
    QueueLimitReached,
)

#: A batch is accepted whole or not at all, or each job is judged on its own.
WHOLE: Final = b"whole"
EACH: Final = b"each"


class Intake:
    """Accepts envelopes, one script call per queue and batch."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def submit(self, envelopes: Sequence[Envelope], mode: bytes) -> list[Receipt | JobRefused]:
        """Accept or refuse each envelope, with `EACH`; `WHOLE` raises the refusal, and no job of that batch is new."""
        first = envelopes[0].queue if envelopes else ""
        if len(envelopes) <= MAX_BATCH and all(envelope.queue == first for envelope in envelopes):
            return await self._submit(first, envelopes, mode) if envelopes else []
        receipts: dict[int, Receipt | JobRefused] = {}
        by_queue: dict[str, list[int]] = {}
        for index, envelope in enumerate(envelopes):
            by_queue.setdefault(envelope.queue, []).append(index)
        for queue, indexes in by_queue.items():
            for start in range(0, len(indexes), MAX_BATCH):
                part = indexes[start : start + MAX_BATCH]
                answers = await self._submit(queue, [envelopes[index] for index in part], mode)
                receipts.update(zip(part, answers, strict=True))
        return [receipts[index] for index in range(len(envelopes))]

    async def _submit(self, queue: str, envelopes: Sequence[Envelope], mode: bytes) -> list[Receipt | JobRefused]:
        store = self._store
        if not store.is_registered(queue):
            try:
                await store.register_queue(queue, owners=possible_owners(queue, envelopes))
            except QueueLimitReached:
                store.counters.intake_refused += len(envelopes)
                raise
        keys, options = store.keys(queue), store.options
        names = list(keys.of_submission)
        names += [keys.job(envelope.job_id) for envelope in envelopes]
        width, jobs, key_names, keyed = _plain(envelopes) or _full(keys, envelopes, options.fingerprint)
        names += key_names
        durable = [position for position, envelope in enumerate(envelopes, 1) if envelope.durable]
        arguments = [store.nonce(), store.feed_limit, options.feed_max_bytes, len(envelopes), width, wire.pack(jobs)]
        arguments += (
            wire.pack(durable) if durable else b"",
            store.names.group,
            RETRY_CONSUMER,
            _tokens(envelopes),
            mode,
            wire.pack(keyed) if keyed else b"",
        )
        lanes = store.lanes(queue).find_submission_lanes({envelope.tenant_id for envelope in envelopes})
        call = partial(store.run_with_lanes, Purpose.SUBMIT, "submit", queue, names, arguments, lanes)
        try:
            reply = await call()
        except ConnectionLost:
            # Retry over a new connection: the job ids make a second copy harmless, while a retry by the caller would
            # create new ids.
            reply = await call()
        if reply[0] == b"detached":
            await self._refresh_epoch(keys)
        return self._receipts(queue, envelopes, reply)

    async def _refresh_epoch(self, keys: QueueKeys) -> None:
        """Read the epoch again, because the reader may be attached in a newer one.

        A master that has had no replicas for a while takes a new replication id and keeps its connections.
        """
        with suppress(EngineUnavailable):
            await self._store.client.epoch(Purpose.SUBMIT, keys.control)

    def _receipts(self, queue: str, envelopes: Sequence[Envelope], reply: list[Any]) -> list[Receipt | JobRefused]:
        counters = self._store.counters
        if reply[0] != b"ok":
            if reply[0] != b"reused":
                counters.intake_refused += len(envelopes)
            if reply[0] in _JOB_REFUSALS:
                raise _job_refusal(queue, envelopes, *reply)
            raise _REFUSALS[reply[0]](queue)
        receipts: list[Receipt | JobRefused] = [Receipt(envelope.job_id) for envelope in envelopes]
        counters.submitted += len(envelopes)
        for position, answer in zip(reply[2::2], reply[3::2], strict=True):
            counters.submitted -= 1
            if type(answer) is list:
                if answer[0] == b"limited":
                    counters.intake_refused += 1
                receipts[position - 1] = _job_refusal(queue, envelopes, *answer)
            elif answer != b"known":
                counters.duplicates += 1
                receipts[position - 1] = Receipt(wire.printable(answer), duplicate=True)
        return receipts


_JOB_REFUSALS: Final = (b"limited", b"reused")


def _job_refusal(queue: str, envelopes: Sequence[Envelope], kind: bytes, *rest: Any) -> JobRefused:
    if kind == b"reused":
        first, position = rest
        return IdempotencyKeyReused(queue, envelopes[position - 1].idempotency_key, wire.printable(first))
    limit, backlog, tenant, *fits = rest
    if not fits:
        return IntakeLimited(queue, limit, backlog, tenant.decode())
    return IntakeLimited(queue, limit, backlog, tenant.decode(), fits=fits[0], count=len(envelopes))


_REFUSALS: Final[dict[bytes, Callable[[str], IntakeRefused]]] = {
    b"paused": lambda queue: IntakeRefused(queue, INTAKE_PAUSED),
    b"full": lambda queue: FeedFull(queue, FEED_BEHIND),
    b"detached": lambda queue: FeedDetached(queue, FEED_DETACHED),
}
_is_fingerprint: Final = re.compile(r"[0-9a-f]{1,32}\Z").match
_NORMAL: Final = int(Priority.NORMAL)
#: Values per job, these values, names of keys, and the values of the jobs that have a key.
_Packing = tuple[int, list[Any], Collection[bytes], list[Any]]


def _plain(envelopes: Sequence[Envelope]) -> _Packing | None:
    """Four values per job, or None.

    None if a job of the batch has other options, or if a job id occurs twice.
    """
    jobs: list[Any] = []
    for envelope in envelopes:
        if (
            envelope.meta is not EMPTY_META
            or envelope.idempotency_key
            or envelope.trace_id
            or envelope.tenant_id != DEFAULT_TENANT
            or envelope.delay_ms
            or envelope.run_at_ms
            or envelope.hold
        ):
            return None
        jobs += (_NORMAL, envelope.job_id, envelope.task, envelope.payload.decode())
    return (4, jobs, (), []) if len(set(jobs[1::4])) == len(envelopes) else None


def _full(keys: QueueKeys, envelopes: Sequence[Envelope], fingerprint: Callable[[str, bytes], str]) -> _Packing:
    """Ten values per job; names of idempotency keys, and of the records of the jobs whose ids they are."""
    jobs: list[Any] = []
    key_indexes: dict[bytes, int] = {}
    by_id: list[bytes] = []
    keyed: list[Any] = []
    for number, envelope in enumerate(envelopes, 1):
        key_index, meta = 0, envelope.meta
        # A job's own id is the same as no key (`has_own_key`).
        if envelope.idempotency_key and envelope.idempotency_key != envelope.job_id:
            name = keys.idempotency(envelope.tenant_id, envelope.idempotency_key)
            key_index = key_indexes.setdefault(name, len(envelopes) + len(key_indexes) + 1)
            if len(key_indexes) > len(by_id):
                by_id.append(keys.job(envelope.idempotency_key))
            request = fingerprint(envelope.task, envelope.payload)
            meta = msgspec.structs.replace(meta, key_fingerprint=request)
            keyed += (number, request, int(envelope.on_key_reuse is KeyReuse.RETURN))
        jobs += (
            int(envelope.meta.priority),
            envelope.job_id,
            envelope.task,
            envelope.payload.decode(),
            _due(envelope),
            key_index,
            envelope.tenant_id,
            envelope.idempotency_key or envelope.job_id,
            envelope.trace_id,
            wire.encode_meta(meta),
        )
    return 10, jobs, [*key_indexes, *by_id], keyed


def _tokens(envelopes: Sequence[Envelope]) -> bytes:
    """The token of new jobs, which has the fingerprint of a schema; packed, a token per job if they differ."""
    schemas = {envelope.schema for envelope in envelopes}
    if len(schemas) == 1:
        return _token(envelopes[0].schema)
    return wire.pack([_token(envelope.schema).decode() for envelope in envelopes])


@lru_cache(maxsize=1_000)
def _token(schema: str) -> bytes:
    # It becomes a part of the record's first line.
    return f"-#{schema}".encode() if _is_fingerprint(schema) else b"-"


def _due(envelope: Envelope) -> str:
    due = "hold" if envelope.hold else ""
    if envelope.delay_ms:
        due += f" in {envelope.delay_ms}"
    elif envelope.run_at_ms:
        due += f" at {envelope.run_at_ms}"
    return due.strip()


#: Messages adopted in one step; each needs many arguments.
_ADOPT_BATCH: Final = 100


class PendingMessage(msgspec.Struct, frozen=True, gc=False):
    """A pending message of this worker, with its stream and delivery count.

    `owner` is the previous one; empty if the message was not reclaimed.
    """

    stream_index: int
    entry: Any
    deliveries: int
    owner: bytes = b""


class Adopter:
    """Turns foreign messages into jobs or dead letters."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def adopt(self, worker: str, queue: str, messages: Sequence[PendingMessage], now_ms: int) -> list[Claim]:
        """Adopt messages and return the claims. Duplicates are dropped, malformed messages are dead-lettered."""
        claims: list[Claim] = []
        await self._store.register_queue(queue)
        for start in range(0, len(messages), _ADOPT_BATCH):
            part = messages[start : start + _ADOPT_BATCH]
            claims += await self._adopt(worker, queue, part, now_ms, keep_ids=True)
        return claims

    async def _adopt(
        self, worker: str, queue: str, messages: Sequence[PendingMessage], now_ms: int, *, keep_ids: bool
    ) -> list[Claim]:
        store, keys = self._store, self._store.keys(queue)
        options = store.options
        adoptions = [_Adoption(message, queue, worker, keep_ids, options) for message in messages]
        names = [*keys.streams, keys.feed, keys.result, keys.dlq, keys.dlq_pending, keys.control]
        names += [keys.waiters, keys.wake]
        names += [keys.job(adoption.job_id) for adoption in adoptions]
        arguments: list[Any] = [
            store.names.group,
            worker,
            store.nonce(),
            store.feed_limit,
            len(adoptions),
            options.finished_ttl_ms,
            options.result_limit,
            int(options.ledger),
            int(bool(store.names.stream_dlq)),
        ]
        key_indexes: dict[bytes, int] = {}
        by_id: list[bytes] = []
        for adoption in adoptions:
            key_index = 0
            if adoption.explicit_key:
                name = keys.idempotency(adoption.body.tenant_id, adoption.explicit_key)
                key_index = key_indexes.setdefault(name, len(adoptions) + len(key_indexes) + 1)
                if len(key_indexes) > len(by_id):
                    by_id.append(keys.job(adoption.explicit_key))
            arguments += adoption.arguments(key_index)
        names += [*key_indexes, *by_id]
        lanes = {message.stream_index // STREAMS_PER_LANE for message in messages} - {0}
        statuses = await store.run_with_lanes(Purpose.CLAIM, "adopt", queue, names, arguments, lanes)
        claims: list[Claim] = []
        clashes: list[PendingMessage] = []
        for adoption, message, status in zip(adoptions, messages, statuses, strict=True):
            if status == b"native" and adoption.native is not None:
                claims.append(msgspec.structs.replace(adoption.native, claimed_at_ms=now_ms))
            elif status == b"adopted" and adoption.claim is not None:
                store.counters.adopted += 1
                claims.append(msgspec.structs.replace(adoption.claim, claimed_at_ms=now_ms))
            elif status == b"clash":
                clashes.append(message)
            elif status == b"dead":
                store.counters.malformed += 1
            elif status == b"duplicate":
                store.counters.skipped += 1
            elif status == b"waits":
                store.counters.not_due += 1
        if clashes:
            # A malformed message with the id of a known job becomes a dead letter with a new id.
            await self._adopt(worker, queue, clashes, now_ms, keep_ids=False)
        return claims


class _Adoption:
    """One foreign message, decoded as a job or as a dead letter."""

    def __init__(self, message: PendingMessage, queue: str, worker: str, keep_id: bool, options: EngineOptions) -> None:
        self._stream_index, self._entry = message.stream_index, message.entry
        self._deliveries, self._owner = message.deliveries, message.owner
        self.claim: Claim | None = None
        self.native = self._parse_native(queue, worker)
        self._head = self._entry[1][1] if self.native else b"?" if self._entry[1][0] == wire.UNVERIFIED else b""
        self._fault, self._dead_letter, self._data, self._fingerprint = b"", b"", b"", ""
        try:
            self.claim = wire.parse_foreign(self._entry, self._stream_index, queue, worker, self._deliveries)
            wire.check_size(self.claim.payload, options.payload_limit)
            self.job_id = self.claim.job_id
            key, meta = self.claim.idempotency_key, self.claim.meta
            self.explicit_key = key if key != self.job_id else ""
            if self.explicit_key:
                self._fingerprint = options.fingerprint(self.claim.task, self.claim.payload)
                meta = msgspec.structs.replace(meta, key_fingerprint=self._fingerprint)
            self.body = wire.record_from_claim(self.claim, meta, 0)
        except wire.MalformedMessage as reason:
            self.claim = None
            fields = wire.as_dict(self._entry[1])
            failure = wire.malformed_failure(str(reason))
            self.job_id = (wire.usable_id(fields.get(b"task_id")) if keep_id else None) or wire.generated_id()
            dlq_id = wire.generated_id()
            self.body = wire.malformed_record(fields, self._entry[0], self._stream_index, failure, dlq_id)
            self.explicit_key = ""
            self._fault = wire.encode_failure(failure).encode()
            self._dead_letter = wire.pack(wire.dead_letter_fields(self.job_id, self.body, failure, dlq_id))
            self._data = wire.encode_json(wire.failure_fields(failure) | {"dlq_id": dlq_id, "history": []})

    def _parse_native(self, queue: str, worker: str) -> Claim | None:
        """The message as one of holdfast's, if its record proves that."""
        if not wire.may_be_native(self._entry[1]):
            return None
        try:
            return wire.parse_entry(self._entry, self._stream_index, queue, worker, self._deliveries, 0)
        except wire.MalformedMessage:
            return None

    def arguments(self, key_index: int) -> tuple[Any, ...]:
        body = self.body
        return (
            self._stream_index,
            self._entry[0],
            self._deliveries,
            self.job_id,
            self._fault,
            wire.encode_record(body) if self._fault else b"",
            self._dead_letter,
            key_index,
            body.task,
            body.payload,
            body.tenant_id,
            body.idempotency_key or self.job_id,
            body.trace_id,
            "" if self._fault else body.meta,
            self._owner,
            self._data,
            self._fingerprint,
            self._head,
        )
