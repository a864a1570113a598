"""Job events as rows of `outbox_events`, and the lanes of outbox keys.

The rows are written in the transaction that writes the events. An event is therefore published once if the history is
written once, even when a process is killed in between. The row's id is derived from the job and the event's number. Its
key is the job id, so events of one job are published in order. Large texts are left out (`TEXT_LIMIT`).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import NAMESPACE_URL, uuid5
from zlib import crc32

import msgspec

from holdfast.core.codec import to_json
from holdfast.core.job import Event
from holdfast.core.states import HEARTBEAT_EVENT, State

#: Number of lanes over which `lane_of` spreads keys. A relay leases whole lanes, so no two relays publish events of one
#: key at the same time.
LANES: Final = 64


def lane_of(destination: str, topic: str, key: str | None, event_id: str) -> int:
    """The lane of a key; an event without a key gets a lane by its id.

    A program in another language may use another function, as long as all events of a key get the same lane.
    """
    return crc32("\0".join((destination, topic, key or event_id)).encode()) % LANES


PUBLISHED_COLUMNS: Final = (
    "tenant_id",
    "id",
    "destination",
    "topic",
    "key",
    "lane",
    "payload",
    "headers",
    "created_at",
)
#: The notice to waiters for outbox events, in place of a queue's name. No queue can have this name.
OUTBOX_CHANGED: Final = "\0outbox"

#: Longer texts (a payload, a result) are left out: brokers reject large messages, and the ledger has the texts.
TEXT_LIMIT: Final = 64 * 1024
#: The attempts so far; left out, since the dead letter has them.
_HISTORY: Final = "history"

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MS: Final = 253_402_300_799_000

PublishedRow = tuple[Any, ...]


class PublishedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A published event: the same fields as in event streams, with the event's number."""

    type: str
    job_id: str
    queue: str
    tenant_id: str
    at: datetime
    seq: int
    from_state: State | None
    to_state: State | None
    attempt: int
    retry_count: int
    worker: str
    message: str
    data: dict[str, Any] | None
    #: Names in `data` whose values were too long.
    omitted: list[str] = []


class EventPublishing(msgspec.Struct, frozen=True):
    """Which events are published, and to which destination and topic."""

    destination: str
    topic: str
    #: Empty: all but heartbeats.
    types: frozenset[str] = frozenset()

    def includes(self, kind: str) -> bool:
        return kind in self.types if self.types else kind != HEARTBEAT_EVENT

    def row(self, queue: str, seq: int, event: Event, instant: Callable[[int], Any]) -> PublishedRow:
        """The outbox row of an event, in the order of `PUBLISHED_COLUMNS`."""
        key = event.job_id
        return (
            event.tenant_id,
            uuid5(NAMESPACE_URL, f"{event.tenant_id}/{queue}/{key}/{seq}").hex,
            self.destination,
            self.topic,
            key,
            lane_of(self.destination, self.topic, key, ""),
            to_json(_published_event(queue, seq, event)),
            to_json({"x-event-name": event.type}),
            instant(event.at_ms),
        )


def _published_event(queue: str, seq: int, event: Event) -> PublishedEvent:
    data, omitted = None, []
    if event.data:
        omitted = [name for name, value in event.data.items() if type(value) is str and len(value) > TEXT_LIMIT]
        data = {name: value for name, value in event.data.items() if name != _HISTORY and name not in omitted}
    return PublishedEvent(
        type=event.type,
        job_id=event.job_id,
        queue=queue,
        tenant_id=event.tenant_id,
        at=_EPOCH + timedelta(milliseconds=min(event.at_ms, _LAST_MS)),
        seq=seq,
        from_state=event.from_state,
        to_state=event.to_state,
        attempt=event.attempt,
        retry_count=event.retry_count,
        worker=event.worker,
        message=event.message,
        data=data,
        omitted=omitted,
    )
