"""`/api/v1/stream`: events as they happen, as server-sent events (requirement H7).

A stream of one job is the job's whole story, by the ledger's own numbers: nothing is missing and nothing comes twice,
however often the connection breaks; it ends with the job. Any other stream begins now, or after `Last-Event-ID`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from holdfast.core.states import FINAL
from holdfast.errors import LedgerUnavailable, UnknownJob
from holdfast.http.asgi import Reply
from holdfast.http.listening import GAP, READY, Listener, Told, encode
from holdfast.http.listening import Wish as Wanted
from holdfast.http.operation import Answer, Call, operation
from holdfast.http.places import Cover
from holdfast.http.streams import CONTENT_TYPE, HEARTBEAT, HEARTBEAT_S, Stream, until_gone
from holdfast.http.tides import Tides
from holdfast.http.wire import LAST_EVENT_PATTERN, Name, Request, event_of_row
from holdfast.ledger.keys import JobKey
from holdfast.ledger.records import EventRow

#: A ledger that was away is looked at again after this long.
_AGAIN_S: Final = 1.0


class Bell(Listener):
    """Rings when the ledger has what the feed has told of a job: then it is time to look, and not before."""

    __slots__ = ("_tides",)

    def __init__(self, wish: Wanted, let_go: Callable[[], None], tides: Tides) -> None:
        super().__init__(wish, let_go)
        self._tides = tides

    def tell(self, chunk: bytes) -> None:
        if chunk is GAP:
            self.ring()

    def hear(self, told: Told, cover: Cover | None) -> None:
        self._tides.when(told.queue, told.at, self)


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a stream. `data` is JSON: a `JobEvent`, or nothing of interest for `ready` and `gap`."""

    event: str
    data: str
    #: To go on after it.
    id: str = ""
    retry: int = 0


class StreamQuery(Request, frozen=True, kw_only=True):
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
        200: Answer(
            "Events of the token's tenants. `gap` says that some may be missing.",
            StreamEvent,
            content_type=CONTENT_TYPE,
            example={"id": "default=12.0", "event": "task.succeeded", "data": '{"type":"task.succeeded"}'},
        ),
        204: Answer("The story of this job is told to its end; do not come back."),
    },
    errors=(UnknownJob,),
)
async def stream(call: Call) -> Reply | None:
    """Hear of events as they happen.

    With `job_id` one job's whole story, which ends with the job. Comments keep the connection alive.
    """
    query: StreamQuery = call.query
    last = call.header("last-event-id") or None
    person = call.person
    wanted = Wanted(
        None if person.sees_all else frozenset(person.tenants),
        frozenset(query.queue),
        frozenset(query.task),
        frozenset(query.type),
        query.job_id,
    )
    if query.job_id is None:
        await _follow(call, wanted, last)
        return None
    view = await call.service.offices.operating.locate(person, query.job_id, _only(query.queue))
    if call.service.offices.ledger is None:
        await _follow(call, wanted, last)
        return None
    return await _tell_story(call, wanted, JobKey(view.tenant_id, view.queue, view.job_id), _number(last))


async def _follow(call: Call, wanted: Wanted, last: str | None) -> None:
    hub, stream = call.service.hub, Stream(call.scope, call.send)
    listener = Listener(wanted, stream.let_go)
    await hub.join(listener, last)
    try:
        async with until_gone(call.receive, listener.end):
            await stream.begin()
            while not listener.over:
                chunk = await listener.take(HEARTBEAT_S)
                await stream.send(chunk or HEARTBEAT)
        await stream.end()
    finally:
        await hub.leave(listener)


async def _tell_story(call: Call, wanted: Wanted, key: JobKey, told: int) -> Reply | None:
    hub, tides, stream = call.service.hub, call.service.tides, Stream(call.scope, call.send)
    bell = Bell(Wanted(wanted.tenants, job_id=key.job_id), stream.let_go, tides)
    await hub.join(bell, None)
    try:
        # What the feed had told before we joined may not be in the ledger yet, and nobody will tell it again.
        tides.when(key.queue, hub.position(key.queue), bell)
        story = await call.service.queries.story(key)
        if story and story[-1].to_state in FINAL and story[-1].seq <= told:
            return Reply(b"", 204)
        async with until_gone(call.receive, bell.end):
            await stream.begin()
            await stream.send(READY)
            while not bell.over:
                rows = [row for row in story if row.seq > told]
                if chunk := b"".join([_line(row) for row in rows if _wants(wanted, row)]):
                    await stream.send(chunk)
                if rows and rows[-1].to_state in FINAL:
                    break
                told = rows[-1].seq if rows else told
                while not await bell.rung(HEARTBEAT_S):
                    await stream.send(HEARTBEAT)
                story = await _look(call, key, bell)
        await stream.end()
    finally:
        tides.forget(key.queue, bell)
        await hub.leave(bell)
    return None


async def _look(call: Call, key: JobKey, bell: Bell) -> list[EventRow]:
    """The story as the ledger has it; nothing while that is away, and then there is another ring."""
    try:
        return await call.service.queries.story(key)
    except LedgerUnavailable:
        asyncio.get_running_loop().call_later(_AGAIN_S, bell.ring)
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
