"""`/api/v1/stream`: events as they happen, as server-sent events (requirement H7).

A stream of one job is the job's whole story, by the ledger's own numbers: nothing is missing and nothing comes twice,
however often the connection breaks; it ends with the job. Any other stream begins now, or after `Last-Event-ID`.
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
from holdfast.http.sse import CONTENT_TYPE, HEARTBEAT, HEARTBEAT_S, EventStream, LedgerWatch, watch_disconnect
from holdfast.http.subscribers import GAP, READY, EventIdCodec, StreamEvent, StreamSubscriber, encode
from holdfast.http.subscribers import StreamFilter as Wanted
from holdfast.http.wire import LAST_EVENT_PATTERN, Name, RequestBase, event_of_row
from holdfast.ledger.queries.records import EventRow

#: A ledger that was away is looked at again after this long.
_AGAIN_S: Final = 1.0


class JobFollower(StreamSubscriber):
    """Rings when the ledger has what the feed has told of a job: then it is time to look, and not before."""

    __slots__ = ("_tides",)

    def __init__(self, wish: Wanted, let_go: Callable[[], None], tides: LedgerWatch) -> None:
        super().__init__(wish, let_go)
        self._tides = tides

    def send(self, chunk: bytes) -> None:
        if chunk is GAP:
            self.wake()

    def on_event(self, told: StreamEvent, cover: EventIdCodec | None) -> None:
        self._tides.notify_at(told.queue, told.at, self)


class ServerSentEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a stream. `data` is JSON: a `JobEvent`, or nothing of interest for `ready` and `gap`."""

    event: str
    data: str
    #: To go on after it.
    id: str = ""
    retry: int = 0


class StreamQuery(RequestBase, frozen=True, kw_only=True):
    """Which events. Everything given must hold."""

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
    headers={"Last-Event-ID": ("Go on after this event.", LAST_EVENT_PATTERN)},
    answers={
        200: ResponseSpec(
            "Events of the token's tenants. `gap` says that some may be missing.",
            ServerSentEvent,
            content_type=CONTENT_TYPE,
            example={"id": "default=12.0", "event": "task.succeeded", "data": '{"type":"task.succeeded"}'},
        ),
        204: ResponseSpec("The story of this job is told to its end; do not come back."),
    },
    errors=(UnknownJob,),
)
async def stream(call: Call) -> Reply | None:
    """Hear of events as they happen.

    With `job_id` one job's whole story, which ends with the job. Comments keep the connection alive.
    """
    query: StreamQuery = call.query
    last = call.header("last-event-id") or None
    person = call.principal
    wanted = Wanted(
        None if person.sees_all_tenants else frozenset(person.tenants),
        frozenset(query.queue),
        frozenset(query.task),
        frozenset(query.type),
        query.job_id,
    )
    if query.job_id is None:
        await _follow(call, wanted, last)
        return None
    view = await call.service.operations.operating.find(person, query.job_id, _only(query.queue))
    if call.service.operations.ledger is None:
        await _follow(call, wanted, last)
        return None
    return await _tell_story(call, wanted, JobKey(view.tenant_id, view.queue, view.job_id), _number(last))


async def _follow(call: Call, wanted: Wanted, last: str | None) -> None:
    hub, stream = call.service.hub, EventStream(call.scope, call.send)
    listener = StreamSubscriber(wanted, stream.disconnect)
    await hub.subscribe(listener, last)
    try:
        async with watch_disconnect(call.receive, listener.end):
            await stream.begin()
            while not listener.over:
                chunk = await listener.next_chunk(HEARTBEAT_S)
                await stream.send(chunk or HEARTBEAT)
        await stream.end()
    finally:
        await hub.unsubscribe(listener)


async def _tell_story(call: Call, wanted: Wanted, key: JobKey, told: int) -> Reply | None:
    hub, tides, stream = call.service.hub, call.service.ledger_watch, EventStream(call.scope, call.send)
    bell = JobFollower(Wanted(wanted.tenants, job_id=key.job_id), stream.disconnect, tides)
    await hub.subscribe(bell, None)
    try:
        # What the feed had told before we joined may not be in the ledger yet, and nobody will tell it again.
        tides.notify_at(key.queue, hub.position(key.queue), bell)
        story = await call.service.queries.events(key)
        if story and story[-1].to_state in FINAL and story[-1].seq <= told:
            return Reply(b"", 204)
        async with watch_disconnect(call.receive, bell.end):
            await stream.begin()
            await stream.send(READY)
            while not bell.over:
                rows = [row for row in story if row.seq > told]
                if chunk := b"".join([_line(row) for row in rows if _wants(wanted, row)]):
                    await stream.send(chunk)
                if rows and rows[-1].to_state in FINAL:
                    break
                told = rows[-1].seq if rows else told
                while not await bell.wait(HEARTBEAT_S):
                    await stream.send(HEARTBEAT)
                story = await _look(call, key, bell)
        await stream.end()
    finally:
        tides.cancel(key.queue, bell)
        await hub.unsubscribe(bell)
    return None


async def _look(call: Call, key: JobKey, bell: JobFollower) -> list[EventRow]:
    """The story as the ledger has it; nothing while that is away, and then there is another ring."""
    try:
        return await call.service.queries.events(key)
    except LedgerUnavailable:
        asyncio.get_running_loop().call_later(_AGAIN_S, bell.wake)
        return []


def _line(row: EventRow) -> bytes:
    return encode(str(row.seq), row.type, event_of_row(row))


def _wants(wanted: Wanted, row: EventRow) -> bool:
    return not wanted.types or row.type in wanted.types


def _number(last: str | None) -> int:
    """What is no number of an event is told the whole story: nothing is missing in that."""
    return int(last) if last is not None and last.isdecimal() and len(last) <= 9 else 0


def _only(queues: tuple[str, ...]) -> str | None:
    return queues[0] if len(queues) == 1 else None
