"""`/api/v1/stream`: events as they happen, as server-sent events (requirement H7).

A stream of one job sends its whole history, numbered by the ledger: no event is missing or repeated, however often the
client reconnects. It ends with the job. Any other stream starts now, or after `Last-Event-ID`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from holdfast.core.job import JobKey
from holdfast.core.states import FINAL
from holdfast.errors import LedgerUnavailable, UnknownJob
from holdfast.http.operation import Call, Reply, ResponseSpec, operation
from holdfast.http.sse import CONTENT_TYPE, HEARTBEAT_S, EventStream, LedgerWatch, watch_disconnect
from holdfast.http.subscribers import (
    GAP,
    HEARTBEAT,
    READY,
    StreamEvent,
    StreamFilter,
    StreamSubscriber,
    encode,
)
from holdfast.http.wire import LAST_EVENT_PATTERN, Name, RequestBase, event_of_row
from holdfast.ledger.queries.records import EventRow

#: Delay before an unreachable ledger is read again.
_RETRY_S: Final = 1.0


class JobFollower(StreamSubscriber):
    """Follows one job. Woken when the ledger has the events that the feed has announced."""

    __slots__ = ("_ledger_watch",)

    def __init__(self, event_filter: StreamFilter, disconnect: Callable[[], None], ledger_watch: LedgerWatch) -> None:
        super().__init__(event_filter, disconnect)
        self._ledger_watch = ledger_watch

    def send(self, chunk: bytes) -> None:
        if chunk is GAP:
            self.wake()

    def send_first(self, chunk: bytes) -> None:
        """Nothing: the stream begins with the history in the ledger."""

    def on_event(self, stream_event: StreamEvent) -> None:
        self._ledger_watch.notify_at(stream_event.queue, stream_event.at, self)


class ServerSentEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a stream. `data` is JSON: a `JobEventResponse`; not meaningful for `ready` and `gap`."""

    event: str
    data: str
    #: Send it as `Last-Event-ID` to continue after this event.
    id: str = ""
    retry: int = 0


class StreamQuery(RequestBase, frozen=True, kw_only=True):
    """Filter for events. All given conditions must match."""

    queue: tuple[Name, ...] = ()
    task: tuple[Name, ...] = ()
    type: tuple[Name, ...] = ()
    job_id: Name | None = None


@operation(
    "GET",
    "/api/v1/stream",
    "streamEvents",
    tag="stream",
    query=StreamQuery,
    headers={"Last-Event-ID": ("Continue after this event.", LAST_EVENT_PATTERN)},
    responses={
        200: ResponseSpec(
            "Events of the token's tenants. A `gap` event means that some may be missing.",
            ServerSentEvent,
            content_type=CONTENT_TYPE,
            example={
                "id": "1790000000000-k3J9xQ2mZpAb",
                "event": "task.succeeded",
                "data": '{"type":"task.succeeded"}',
            },
        ),
        204: ResponseSpec("All events of this finished job were already sent; do not reconnect."),
    },
    errors=(UnknownJob,),
)
async def stream(call: Call) -> Reply | None:
    """Stream events as they happen.

    With `job_id`: the whole history of one job; the stream ends with the job. Comments keep the connection alive.
    """
    query: StreamQuery = call.query
    last = call.header("last-event-id") or None
    principal = call.principal
    event_filter = StreamFilter(
        None if principal.sees_all_tenants else frozenset(principal.tenants),
        frozenset(query.queue),
        frozenset(query.task),
        frozenset(query.type),
        query.job_id,
    )
    if query.job_id is None:
        await _follow(call, event_filter, last)
        return None
    view = await call.service.operations.jobs.find(principal, query.job_id, _only(query.queue))
    if call.service.operations.ledger is None:
        # A job's events are in one feed: the stream continues exactly after the last one.
        await _follow(call, msgspec.structs.replace(event_filter, queues=frozenset({view.queue})), last)
        return None
    stream, key = EventStream(call.scope, call.send), JobKey(view.tenant_id, view.queue, view.job_id)
    followed = StreamFilter(event_filter.tenants, frozenset({key.queue}), job_id=key.job_id)
    follower = JobFollower(followed, stream.disconnect, call.service.ledger_watch)
    with call.ending_with_token(follower.end, stream.disconnect):
        return await _follow_job(call, event_filter.types, key, _last_seq(last), stream, follower)


async def _follow(call: Call, event_filter: StreamFilter, last: str | None) -> None:
    hub, stream = call.service.hub, EventStream(call.scope, call.send)
    subscriber = StreamSubscriber(event_filter, stream.disconnect)
    with call.ending_with_token(subscriber.end, stream.disconnect):
        await hub.subscribe(subscriber, last)
        try:
            async with watch_disconnect(call.receive, subscriber.end):
                await stream.begin()
                while not subscriber.over:
                    chunk = await subscriber.next_chunk(HEARTBEAT_S)
                    await stream.send(chunk or hub.heartbeat)
            await stream.end()
        finally:
            await hub.unsubscribe(subscriber)


async def _follow_job(
    call: Call, types: frozenset[str], key: JobKey, sent: int, stream: EventStream, follower: JobFollower
) -> Reply | None:
    hub, ledger_watch = call.service.hub, call.service.ledger_watch
    await hub.subscribe(follower, None)
    try:
        # Events published before the subscription may not be in the ledger yet, and are not announced again.
        ledger_watch.notify_at(key.queue, hub.position(key.queue), follower)
        history = await call.service.queries.events(key)
        if history and history[-1].to_state in FINAL and history[-1].seq <= sent:
            return Reply(b"", 204)
        async with watch_disconnect(call.receive, follower.end):
            await stream.begin()
            await stream.send(READY)
            while not follower.over:
                rows = [row for row in history if row.seq > sent]
                if chunk := b"".join([_encode(row) for row in rows if not types or row.type in types]):
                    await stream.send(chunk)
                if rows and rows[-1].to_state in FINAL:
                    break
                sent = rows[-1].seq if rows else sent
                while not await follower.wait(HEARTBEAT_S):
                    await stream.send(HEARTBEAT)
                history = await _read_history(call, key, follower)
        await stream.end()
    finally:
        ledger_watch.cancel(key.queue, follower)
        await hub.unsubscribe(follower)
    return None


async def _read_history(call: Call, key: JobKey, follower: JobFollower) -> list[EventRow]:
    """Read a job's events from the ledger. If it is unreachable, return none and wake the follower later."""
    try:
        return await call.service.queries.events(key)
    except LedgerUnavailable:
        asyncio.get_running_loop().call_later(_RETRY_S, follower.wake)
        return []


def _encode(row: EventRow) -> bytes:
    return encode(str(row.seq), row.type, event_of_row(row))


def _last_seq(last: str | None) -> int:
    """Sequence number in `Last-Event-ID`; 0, that is the whole history, if it is not a number."""
    return int(last) if last is not None and last.isdecimal() and len(last) <= 9 else 0


def _only(queues: tuple[str, ...]) -> str | None:
    return queues[0] if len(queues) == 1 else None
