"""submit: the way in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from holdfast.core.job import DEFAULT_TENANT, EMPTY_META, Envelope, Priority, Receipt
from holdfast.engine.port import FEED_BEHIND, FEED_UNREAD, INTAKE_FULL, INTAKE_PAUSED, MAX_BATCH
from holdfast.engine.redis import wire
from holdfast.engine.redis.client import ConnectionLost, Purpose
from holdfast.engine.redis.keys import PARKING, Keys
from holdfast.engine.redis.store import Store
from holdfast.errors import EngineUnavailable, FeedFull, FeedUnread, IntakeLimited, IntakeRefused


class Intake:
    """Accepts envelopes, one script call per queue and batch."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def submit(self, envelopes: Sequence[Envelope]) -> list[Receipt]:
        first = envelopes[0].queue if envelopes else ""
        if len(envelopes) <= MAX_BATCH and all(envelope.queue == first for envelope in envelopes):
            return await self._submit(first, envelopes) if envelopes else []
        receipts: dict[int, Receipt] = {}
        by_queue: dict[str, list[int]] = {}
        for index, envelope in enumerate(envelopes):
            by_queue.setdefault(envelope.queue, []).append(index)
        for queue, indexes in by_queue.items():
            for start in range(0, len(indexes), MAX_BATCH):
                part = indexes[start : start + MAX_BATCH]
                answers = await self._submit(queue, [envelopes[index] for index in part])
                receipts.update(zip(part, answers, strict=True))
        return [receipts[index] for index in range(len(envelopes))]

    async def _submit(self, queue: str, envelopes: Sequence[Envelope]) -> list[Receipt]:
        store = self._store
        await store.introduce(queue)
        keys, options = store.keys(queue), store.options
        names = [*keys.streams, keys.feed, keys.delayed, keys.held, keys.control, keys.notices, keys.wake, keys.lanes]
        names += [keys.job(envelope.job_id) for envelope in envelopes]
        width, jobs, key_names = _plain(envelopes) or _full(keys, envelopes)
        names += key_names
        durable = [position for position, envelope in enumerate(envelopes, 1) if envelope.durable]
        arguments = [store.nonce(), store.feed_limit, options.feed_max_bytes, len(envelopes), width, wire.pack(jobs)]
        # The connection says whose memory it speaks to.
        arguments += (
            b"?" if options.ledger else b"",
            wire.pack(durable) if durable else b"",
            store.names.group,
            PARKING,
        )
        lanes = store.lanes(queue).for_submission({envelope.tenant_id for envelope in envelopes})
        call = partial(store.run_on_lines, Purpose.SUBMIT, "submit", queue, names, arguments, lanes)
        try:
            reply = await call()
        except ConnectionLost:
            # Once more, over a new connection: the job ids make a second copy harmless, and a caller who tried
            # again by itself would make new ones.
            reply = await call()
        if reply[0] == b"unread":
            await self._look_again(keys)
        return self._receipts(queue, envelopes, reply)

    async def _look_again(self, keys: Keys) -> None:
        """The reader may know the server under a newer name than we do: one whose replicas are gone for long changes
        it, and keeps its connections."""
        with suppress(EngineUnavailable):
            await self._store.client.incarnation(Purpose.SUBMIT, keys.control)

    def _receipts(self, queue: str, envelopes: Sequence[Envelope], reply: list[Any]) -> list[Receipt]:
        counts = self._store.counts
        if reply[0] == b"limited":
            counts.intake_refused += len(envelopes)
            raise IntakeLimited(queue, _limited(*reply[1:]))
        if reply[0] != b"ok":
            counts.intake_refused += len(envelopes)
            raise _REFUSALS[reply[0]](queue)
        receipts = [Receipt(envelope.job_id) for envelope in envelopes]
        counts.submitted += len(envelopes)
        for position, answer in zip(reply[2::2], reply[3::2], strict=True):
            counts.submitted -= 1
            if answer != b"known":
                counts.duplicates += 1
                receipts[position - 1] = Receipt(answer.decode(), duplicate=True)
        return receipts


def _limited(limit: int, backlog: int, tenant: bytes) -> str:
    whose = f"tenant {tenant.decode()!r}" if tenant else "it"
    return f"{INTAKE_FULL} ({whose} has {backlog:,}, the limit is {limit:,})"


_REFUSALS: Final[dict[bytes, Callable[[str], IntakeRefused]]] = {
    b"paused": lambda queue: IntakeRefused(queue, INTAKE_PAUSED),
    b"full": lambda queue: FeedFull(queue, FEED_BEHIND),
    b"unread": lambda queue: FeedUnread(queue, FEED_UNREAD),
}
_NORMAL: Final = int(Priority.NORMAL)
_Packing = tuple[int, list[Any], Collection[bytes]]


def _plain(envelopes: Sequence[Envelope]) -> _Packing | None:
    """Four values a job, if no job of the batch has more to say and none is there twice."""
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
    return (4, jobs, ()) if len(set(jobs[1::4])) == len(envelopes) else None


def _full(keys: Keys, envelopes: Sequence[Envelope]) -> _Packing:
    """Ten values a job, and the names of idempotency keys."""
    jobs: list[Any] = []
    key_indexes: dict[bytes, int] = {}
    for envelope in envelopes:
        key_index = 0
        if envelope.idempotency_key:
            name = keys.idempotency(envelope.tenant_id, envelope.idempotency_key)
            key_index = key_indexes.setdefault(name, len(envelopes) + len(key_indexes) + 1)
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
            wire.meta_text(envelope.meta),
        )
    return 10, jobs, key_indexes


def _due(envelope: Envelope) -> str:
    due = "hold" if envelope.hold else ""
    if envelope.delay_ms:
        due += f" in {envelope.delay_ms}"
    elif envelope.run_at_ms:
        due += f" at {envelope.run_at_ms}"
    return due.strip()
