"""Reads on Redis: jobs, controls, stats, workers, queues, notices, final states.

`CompletionWaiter` waits for a job's final state with one subscription per engine and one channel per awaited job. It
keeps round trips few: it subscribes while the job is read for the first time, and the next read registers the waiter in
the same step. Messages can be lost with a connection, so the job is also read again every `_READ_AGAIN_S` seconds.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Final

import hiredis
import msgspec

from holdfast.core.job import DEFAULT_TENANT, EMPTY_META, Failure, JobInfo
from holdfast.core.states import FINAL, State
from holdfast.core.text import check_name
from holdfast.core.verdict import MESSAGE_GONE, MESSAGE_MALFORMED
from holdfast.engine.port.reads import CancelledNotice, ControlNotice, DueNotice, Notice, QueueStats, WorkerInfo
from holdfast.engine.redis import wire
from holdfast.engine.redis.claims import merge_record
from holdfast.engine.redis.controls import control_from, gate_from
from holdfast.engine.redis.keys import OWNED_QUEUE, RETRY_CONSUMER, parse_lanes
from holdfast.engine.redis.net.client import Purpose
from holdfast.engine.redis.net.connection import PubSubConnection
from holdfast.engine.redis.net.errors import ConnectionLost, ScriptError, Unreachable, translate
from holdfast.engine.redis.store import RedisStore
from holdfast.errors import EngineUnavailable, InvalidOption

#: How long the last list of queues is used after its node did not answer.
_LIST_S: Final = 30.0
#: An idle worker claims at least this often.
_IDLE_CLAIM_MS: Final = 10_000
#: Digits of an instant in milliseconds.
_INSTANT_DIGITS: Final = 15


class Reads:
    """Reads of one Redis."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        #: Queue → id of its last notice.
        self._last_notices: dict[str, bytes] = {}
        #: The last list of all queues; not read again before `_list_at` if its node did not answer.
        self._queues: list[str] = []
        self._list_at = 0.0

    async def get(self, queue: str, job_ids: Sequence[str], *, register: bool = False) -> list[JobInfo | None]:
        """Return jobs. `register`: the end of each open job will be published on its channel."""
        if not job_ids:
            return []
        keys = self._store.keys(queue)
        records = (keys.job(job_id) for job_id in job_ids)
        names = [*keys.streams, keys.pending_retries, keys.retry, keys.delayed, keys.waiters, keys.control]
        names += records
        arguments = [self._store.names.group, int(register), *job_ids]
        lanes = self._store.lanes(queue).all()
        replies = await self._store.run_with_lanes(Purpose.OTHER, "get", queue, names, arguments, lanes)
        return [
            info_from_reply(queue, job_id, reply) if reply else None
            for job_id, reply in zip(job_ids, replies, strict=True)
        ]

    async def find(self, queue: str, states: Collection[State], limit: int) -> list[JobInfo]:
        candidates: dict[str, None] = {}
        for state in states:
            candidates.update(dict.fromkeys(await self._candidates(queue, state, limit)))
        views = [view for view in await self.get(queue, list(candidates)) if view and view.state in states]
        views.sort(key=lambda view: (view.created_at_ms, view.job_id), reverse=True)
        return views[:limit]

    async def _candidates(self, queue: str, state: State, limit: int) -> list[str]:
        keys, call = self._store.keys(queue), self._store.client.call
        sets = {
            State.RETRYING: (keys.retry, keys.pending_retries),
            State.QUEUED: (keys.delayed,),
            State.SUSPENDED: (keys.suspended,),
            State.WAITING_APPROVAL: (keys.waiting_approval,),
            State.DLQ_PENDING: (keys.dlq_pending,),
            State.DLQ_RECORDED: (keys.dlq_pending,),
        }
        found: list[bytes] = []
        for name in sets.get(state, ()):
            found += await call(Purpose.OTHER, b"ZREVRANGE", name, 0, limit - 1)
        streams: list[bytes] = []
        if state in FINAL:
            streams = [keys.result]
        elif state in (State.QUEUED, State.RUNNING, State.RETRYING):
            streams = [stream for _, stream in await self._store.streams_in_use(queue, Purpose.OTHER)]
        for stream in streams:
            # Twice the limit: the newest entries of a stream may all be in another state.
            for entry in await call(Purpose.OTHER, b"XREVRANGE", stream, b"+", b"-", b"COUNT", 2 * limit):
                found.append(wire.as_dict(entry[1]).get(b"task_id", b""))
        return [wire.printable(job_id) for job_id in found if job_id]

    async def stats(self, queue: str) -> QueueStats:
        keys = self._store.keys(queue)
        names = [
            *keys.streams,
            keys.feed,
            keys.retry,
            keys.pending_retries,
            keys.suspended,
            keys.waiting_approval,
            keys.dlq_pending,
            keys.delayed,
            keys.control,
            keys.dlq,
            keys.workers,
            keys.lanes,
        ]
        live_ms = self._store.options.visibility_timeout_ms + _IDLE_CLAIM_MS
        arguments = [self._store.names.group, RETRY_CONSUMER, live_ms]
        lanes = self._store.lanes(queue).all()
        reply = await self._store.run_with_lanes(Purpose.OTHER, "stats", queue, names, arguments, lanes)
        in_streams, pending, parked, retry, suspended, waiting_approval, dead, delayed, *others = reply
        entries, dead_letters, workers, control, size, lanes_by_tenant, backlogs, epoch = others
        return QueueStats(
            queue=queue,
            states={
                State.QUEUED: max(0, in_streams - pending) + delayed,
                State.RUNNING: pending - parked,
                State.RETRYING: retry + parked,
                State.SUSPENDED: suspended,
                State.WAITING_APPROVAL: waiting_approval,
                State.DLQ_PENDING: dead,
            },
            delayed=delayed,
            control=control_from(self._store, queue, control),
            workers=workers,
            feed_entries=entries,
            feed_share=size / self._store.options.feed_max_bytes,
            dead_letters=dead_letters,
            backlog=in_streams - parked,
            pending=pending,
            tenants=_group_by_tenant(lanes_by_tenant, backlogs),
            gate=gate_from(wire.as_dict(control), epoch),
        )

    async def workers(self, queues: Sequence[str]) -> list[WorkerInfo]:
        found = await self._store.outages.for_each(queues, self._workers)
        return sorted((view for views in found.values() for view in views), key=lambda view: (view.worker, view.queue))

    async def _workers(self, queue: str) -> list[WorkerInfo]:
        store, keys = self._store, self._store.keys(queue)
        names, arguments = [*keys.streams, keys.workers, keys.control], [store.names.group, RETRY_CONSUMER]
        lanes = store.lanes(queue).all()
        reply = await store.run_with_lanes(Purpose.OTHER, "workers", queue, names, arguments, lanes)
        return [
            WorkerInfo(worker=wire.printable(name), queue=queue, seen_at_ms=wire.instant(seen_at_ms), pending=pending)
            for name, seen_at_ms, pending in zip(reply[::3], reply[1::3], reply[2::3], strict=True)
        ]

    async def queues(self) -> list[str]:
        if self._queues and time.monotonic() < self._list_at:
            return list(self._queues)
        try:
            read = partial(self._store.client.call, Purpose.OTHER, b"SMEMBERS", self._store.names.queues)
            names = await self._store.run_on_list_node(read, waits=not self._queues)
        except EngineUnavailable as exc:
            if not self._store.names.cluster:
                raise
            # On a Cluster the list may be on another node than the queues; without that node, use the last list.
            self._list_at = time.monotonic() + _LIST_S
            if not self._queues:
                raise EngineUnavailable(
                    "the list of queues is on a node of the Redis Cluster that does not answer; name the queues, or "
                    f"restore that node: {exc}"
                ) from exc
        else:
            self._queues = sorted(name for name in map(wire.printable, names) if _is_queue(name))
        return list(self._queues)

    async def queue_owners(self) -> dict[str, str]:
        found = await self._store.client.call(Purpose.OTHER, b"HGETALL", self._store.names.owners)
        return {
            wire.printable(name.removeprefix(OWNED_QUEUE)): wire.printable(tenant)
            for name, tenant in zip(found[::2], found[1::2], strict=True)
            if name.startswith(OWNED_QUEUE)
        }

    # listen ----------------------------------------------------------------------------------------

    async def listen(self, queues: Sequence[str], wait_ms: int) -> list[Notice]:
        client = self._store.client
        wait_ms = min(wait_ms, client.max_block_ms)
        by_stream = {self._store.keys(queue).notices: queue for queue in queues}
        if new := [queue for queue in queues if queue not in self._last_notices]:
            await self._store.outages.for_each(new, self._start_listening)
        started = [queue for queue in queues if queue in self._last_notices]
        reachable = {queue for queue in started if not self._store.outages.is_skipped(queue)} or set(started)
        positions = {stream: self._last_notices[queue] for stream, queue in by_stream.items() if queue in reachable}
        # BLOCK 0 would block for ever.
        head = (b"XREAD", b"BLOCK", max(1, wait_ms))
        notices: list[Notice] = []
        try:
            reply = await client.read(Purpose.LISTEN, head, positions, wait_ms / 1000)
        except ScriptError as exc:
            if not exc.is_wrong_type:
                raise
            # Without its queue, the next call succeeds.
            await self._store.outages.for_each(reachable, self._start_listening)
            return []
        for stream, entries in reply:
            queue = by_stream[stream]
            self._last_notices[queue] = entries[-1][0]
            found = [_notice(queue, wire.as_dict(entry[1])) for entry in entries]
            notices += [notice for notice in found if notice is not None]
            self._store.counters.unreadable += found.count(None)
        return notices

    async def _start_listening(self, queue: str) -> bool:
        command = (b"XREVRANGE", self._store.keys(queue).notices, b"+", b"-", b"COUNT", 1)
        newest = await self._store.client.call(Purpose.LISTEN, *command)
        self._last_notices[queue] = newest[0][0] if newest else b"0-0"
        return True


def _group_by_tenant(lanes: Sequence[bytes], backlogs: Sequence[int]) -> dict[str, int]:
    """Backlogs by tenant. A shared lane counts for the tenant that owns it."""
    owners = {0: DEFAULT_TENANT}
    for tenant, lane in zip(lanes[::2], lanes[1::2], strict=True):
        if lane.isdigit() and (own := parse_lanes(lane)):
            owners[own[0]] = wire.printable(tenant)
    tenants: dict[str, int] = {}
    for number, backlog in zip(backlogs[::2], backlogs[1::2], strict=True):
        if backlog:
            owner = owners.get(number, DEFAULT_TENANT)
            tenants[owner] = tenants.get(owner, 0) + backlog
    return tenants


def info_from_reply(queue: str, job_id: str, reply: list[Any]) -> JobInfo | None:
    """Decode the script `get`'s reply for one job; None if its record does not even have a state."""
    header, _, packed = reply[0].partition(b"\n")
    _, state_name, token = (*header.split(b" ", 2), b"", b"")[:3]
    state = _STATES.get(state_name)
    if state is None:
        return None
    if len(reply) < 5:
        due = wire.instant(reply[2]) if len(reply) == 3 else 0
        info = wire.info_from_record(queue, job_id, state, packed, due) or _bare_info(
            queue, job_id, state, "", _UNREADABLE
        )
    else:
        info = _info_from_message(queue, job_id, state, reply)
    schema = _schema_in(token)
    return info if schema is None else msgspec.structs.replace(info, schema=schema[1].decode())


def _info_from_message(queue: str, job_id: str, state: State, reply: list[Any]) -> JobInfo:
    record, fields, owner_name, deliveries, due = reply
    owner = wire.printable(owner_name)
    if not fields:
        return _bare_info(queue, job_id, state, owner, _GONE)
    index, _, message_id = record.split(b" ", 1)[0].partition(b":")
    entry = (message_id, fields)
    parse = wire.parse_entry if wire.is_native(fields) else wire.parse_adopted
    try:
        claim = merge_record(parse(entry, int(index), queue, owner, deliveries, 0), record)
    except (wire.MalformedMessage, ValueError):
        return _bare_info(queue, job_id, state, owner, _UNREADABLE)
    waits = not owner or owner == RETRY_CONSUMER
    if not waits:
        state = State.RUNNING
    meta = claim.meta
    if deliveries:
        meta = msgspec.structs.replace(meta, lost_leases=max(0, meta.lost_leases + deliveries - int(not waits)))
    return JobInfo(
        job_id=job_id,
        task=claim.task,
        queue=queue,
        tenant_id=claim.tenant_id,
        state=state,
        attempt=claim.attempt,
        payload=claim.payload,
        idempotency_key=claim.idempotency_key,
        trace_id=claim.trace_id,
        meta=meta,
        created_at_ms=claim.created_at_ms,
        worker="" if waits else owner,
        failure=meta.history[-1].failure if meta.history and state is State.RETRYING else None,
        next_attempt_at_ms=wire.instant(due),
    )


_STATES: Final = {state.value.encode(): state for state in State}
_GONE: Final = Failure(MESSAGE_GONE, "its message was deleted from the stream by another program")
_UNREADABLE: Final = Failure(MESSAGE_MALFORMED, "its record or message cannot be read; another program has changed it")


def _bare_info(queue: str, job_id: str, state: State, owner: str, failure: Failure) -> JobInfo:
    """A job whose message another program deleted (XDEL, XTRIM, DEL), or changed; only its id and state are left."""
    return JobInfo(
        job_id=job_id,
        task="",
        queue=queue,
        tenant_id="",
        state=State.RUNNING if owner not in ("", RETRY_CONSUMER) else state,
        attempt=0,
        payload=b"",
        idempotency_key="",
        trace_id="",
        meta=EMPTY_META,
        created_at_ms=0,
        worker=owner,
        failure=failure,
    )


def _notice(queue: str, fields: dict[bytes, bytes]) -> Notice | None:
    """Decode a notice; None if it cannot be read. Other programs can write to the stream."""
    if b"cancelled" in fields:
        return CancelledNotice(queue, wire.printable(fields[b"cancelled"]))
    if b"due" in fields:
        due = fields[b"due"]
        return DueNotice(queue, int(due)) if len(due) <= _INSTANT_DIGITS and due.isdigit() else None
    return ControlNotice(queue)


def _is_queue(name: str) -> bool:
    """Whether a member of the set of queues is the name of one. Other programs can add any bytes."""
    try:
        check_name(name, "queue")
    except InvalidOption:
        return False
    return "\ufffd" not in name


#: The fingerprint in a record's token.
_schema_in: Final = re.compile(rb"#([0-9a-f]{1,32})\Z").search

_log: Final = logging.getLogger("holdfast.engine.redis")

#: Interval of reads while waiting: a published message can be lost with its connection.
_READ_AGAIN_S: Final = 2.0


class _Channel(msgspec.Struct):
    """The channel of an awaited job: the reply to its subscription, and the waiters that share it."""

    subscribed: asyncio.Future[Any]
    waiters: set[asyncio.Event]


class CompletionWaiter:
    """Wakes callers when the job that they wait for has ended."""

    def __init__(self, store: RedisStore, readers: Reads) -> None:
        self._store = store
        self._readers = readers
        self._subscription: PubSubConnection | None = None
        self._opening = asyncio.Lock()
        self._channels: dict[bytes, _Channel] = {}

    async def wait_final(self, queue: str, job_id: str, wait_ms: int) -> JobInfo | None:
        deadline = asyncio.get_running_loop().time() + wait_ms / 1000
        if wait_ms <= 0:
            return await self._get(queue, job_id)
        ended = asyncio.Event()
        channel = self._store.keys(queue).waiters + b":" + job_id.encode()
        try:
            subscribing = await self._subscribe(channel, ended)
            view = await self._get(queue, job_id)
            while view is not None and view.state not in FINAL:
                try:
                    await _wait_subscribed(subscribing)
                except Unreachable:
                    # On a Cluster, the node of the subscription need not be that of the queue.
                    await _wait_subscribed(await self._subscribe(channel, ended))
                ended.clear()
                view = await self._register(queue, job_id)
                left = deadline - asyncio.get_running_loop().time()
                if view is None or view.state in FINAL or left <= 0:
                    break
                try:
                    async with asyncio.timeout(min(left, _READ_AGAIN_S)):
                        await ended.wait()
                except TimeoutError:
                    subscribing = await self._subscribe(channel, ended)
                else:
                    view = await self._get(queue, job_id)
            return view
        finally:
            self._unsubscribe(channel, ended)

    def close(self) -> None:
        """Close the subscription."""
        if self._subscription is not None:
            self._subscription.close()

    async def _get(self, queue: str, job_id: str) -> JobInfo | None:
        try:
            return (await self._readers.get(queue, [job_id]))[0]
        except ConnectionLost:
            # One disconnect does not end a wait, and a read can be repeated.
            return (await self._readers.get(queue, [job_id]))[0]

    async def _register(self, queue: str, job_id: str) -> JobInfo | None:
        """Read the job; if it is open, its end will be published from now on."""
        try:
            return (await self._readers.get(queue, [job_id], register=True))[0]
        except EngineUnavailable as exc:
            # Redis is full or read-only, so the end will not be published; wait by polling.
            _log.debug("waiting for job %s by polling: %s", job_id, exc)
            return await self._get(queue, job_id)

    async def _subscribe(self, channel: bytes, ended: asyncio.Event) -> asyncio.Future[Any]:
        """Subscribe unless another waiter already has; return the future reply of Redis."""
        subscription = await self._connect()
        awaited = self._channels.get(channel)
        if awaited is None:
            awaited = self._channels[channel] = _Channel(_call(subscription, channel), set())
        awaited.waiters.add(ended)
        return awaited.subscribed

    def _unsubscribe(self, channel: bytes, ended: asyncio.Event) -> None:
        awaited = self._channels.get(channel)
        if awaited is None:
            return
        awaited.waiters.discard(ended)
        if not awaited.waiters:
            del self._channels[channel]
            if self._subscription is not None and self._subscription.usable:
                self._subscription.send_nowait(b"UNSUBSCRIBE", channel)

    async def _connect(self) -> PubSubConnection:
        async with self._opening:
            if self._subscription is None or not self._subscription.usable:
                self._subscription = await self._store.client.subscription(self._on_message)
                for channel, awaited in self._channels.items():
                    awaited.subscribed = _call(self._subscription, channel)
            return self._subscription

    def _on_message(self, channel: bytes) -> None:
        if (awaited := self._channels.get(channel)) is not None:
            for ended in awaited.waiters:
                ended.set()


def _call(subscription: PubSubConnection, channel: bytes) -> asyncio.Future[Any]:
    subscribing = subscription.call(b"SUBSCRIBE", channel)
    # The reply is not awaited if the job has already ended; its error is then ignored.
    subscribing.add_done_callback(lambda done: done.cancelled() or done.exception())
    return subscribing


async def _wait_subscribed(subscribing: asyncio.Future[Any]) -> None:
    try:
        # Shielded because waiters share it: cancelling one waiter must not cancel the others.
        await asyncio.shield(subscribing)
    except (OSError, hiredis.ReplyError) as exc:
        raise translate(exc) from exc
