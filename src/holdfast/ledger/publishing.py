"""Job events, published through the outbox: rows of `outbox_events`, written in the transaction that writes the events.

So each event of a job's story is published once if the story is written once, whoever is killed in between. Its id is
made of the job and the event's number, and its key is the job: of one job they are published in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import NAMESPACE_URL, uuid5

import msgspec

from holdfast.core.job import Event
from holdfast.core.states import HEARTBEAT_EVENT, State
from holdfast.ledger.folding import Draft, to_json
from holdfast.ledger.outbox_store import lane_of

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
#: What a file's writer tells those who wait for events of the outbox. No queue has such a name.
OUTBOX_NEWS: Final = "\0outbox"

#: Longer texts (a payload, a result) are left out: brokers take no large messages, and the ledger has them.
TEXT_LIMIT: Final = 64 * 1024
#: The attempts so far; the dead letter has them.
_HISTORY: Final = "history"

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MS: Final = 253_402_300_799_000

Row = tuple[Any, ...]


class PublishedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What is published: the same as event streams tell, with the event's number."""

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
    #: Parts of `data` that were too long.
    left_out: list[str] = []


class Publishing(msgspec.Struct, frozen=True):
    """Which events are published, and where to."""

    destination: str
    topic: str
    #: Empty: all but heartbeats.
    types: frozenset[str] = frozenset()

    def wants(self, kind: str) -> bool:
        return kind in self.types if self.types else kind != HEARTBEAT_EVENT

    def row(self, queue: str, seq: int, event: Event, instant: Callable[[int], Any]) -> Row:
        """In the order of `PUBLISHED_COLUMNS`."""
        key = event.job_id
        return (
            event.tenant_id,
            uuid5(NAMESPACE_URL, f"{event.tenant_id}/{queue}/{key}/{seq}").hex,
            self.destination,
            self.topic,
            key,
            lane_of(self.destination, self.topic, key, ""),
            to_json(_published(queue, seq, event)),
            to_json({"x-event-name": event.type}),
            instant(event.at_ms),
        )


def published_rows(
    publishing: Publishing, drafts: Iterable[Draft], queue: str, instant: Callable[[int], Any]
) -> list[Row]:
    """Of the events of a batch, numbered on from each draft's `seq`."""
    return [
        publishing.row(queue, seq, event, instant)
        for draft in drafts
        for seq, event in enumerate(draft.events, draft.seq + 1)
        if publishing.wants(event.type)
    ]


def _published(queue: str, seq: int, event: Event) -> PublishedEvent:
    data, left_out = None, []
    if event.data:
        left_out = [name for name, value in event.data.items() if type(value) is str and len(value) > TEXT_LIMIT]
        data = {name: value for name, value in event.data.items() if name != _HISTORY and name not in left_out}
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
        left_out=left_out,
    )
