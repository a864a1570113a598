"""Broker protocols for triggers and the outbox: `QueueAdapter`, `Publisher` and their messages.

A client connects once in the foreground, so that a wrong address or password is reported immediately. After that it
reconnects by itself with backoff and logs it. No error, log record or `repr` of a client contains a credential.

Also what all brokers share: dead-letter headers, the error for tombstones, and conversion of external timestamps.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import msgspec

from holdfast.errors import BrokerRefused, BrokerUnavailable


class RawMessage(msgspec.Struct, frozen=True, eq=False):
    """One delivery of a message. Two deliveries of one message are two instances."""

    #: Unique within a broker and queue; the same for every delivery of the message.
    message_id: str
    #: None: a tombstone (a Kafka message without a value). Not the same as an empty body.
    body: bytes | None
    #: Names are lower case. If a name occurs twice, the last value wins.
    headers: Mapping[str, str]
    #: When it was written, by the clock of the broker or the writer; time of receipt if the broker has no timestamp.
    timestamp: datetime
    #: Broker-specific: topic, partition and offset; exchange and routing key; receipt handle …
    metadata: Mapping[str, Any]
    #: Messages with the same key are delivered in order. Empty: no ordering.
    key: str = ""
    #: Delivery count including this delivery, as far as the broker counts.
    deliveries: int = 1


class QueueAdapter(Protocol):
    """Consumer of one queue (T1). Use it in one event loop, with one `consume` at a time.

    Delivery is at least once: a message that is neither acknowledged nor refused is delivered again after a reconnect
    or restart, to this consumer or to another one of its group.
    """

    async def connect(self) -> None:
        """Connect and find the queue. Raises `BrokerUnavailable` or `BrokerRefused` without retrying."""
        ...

    def consume(self) -> AsyncIterator[RawMessage]:
        """Yield messages until `close`. Reconnects by itself.

        At most `prefetch` messages are in flight, that is delivered and neither acknowledged nor refused.
        """
        ...

    async def ack(self, message: RawMessage) -> None:
        """Acknowledge the message. No-op if this consumer no longer owns it (reconnect, rebalance)."""
        ...

    async def nack(self, message: RawMessage, requeue: bool = False) -> None:
        """Refuse the message. With `requeue` it is delivered again soon; otherwise the broker drops it.

        A dropped message goes to the broker's own dead letters if configured. A broker without them treats it as `ack`.
        """
        ...

    async def send_to_dlq(self, message: RawMessage, reason: str, history: Sequence[str] = ()) -> None:
        """Write the message to the dead-letter queue and acknowledge it once that is confirmed.

        Body and headers stay unchanged; `x-dead-reason`, `x-dead-history` (a JSON list), `x-dead-source` and
        `x-dead-message-id` are added. If the dead letter cannot be written, it raises and the message stays in flight.
        """
        ...

    def owns(self, message: RawMessage) -> bool:
        """Whether an `ack` would still count.

        If not, abandon the message: it is delivered again, to this consumer or to another.
        """
        ...

    async def pause(self) -> None:
        """Deliver nothing until `resume`, but stay a member of the group."""
        ...

    async def resume(self) -> None: ...

    async def lag(self) -> int | None:
        """Number of messages waiting for this group, or None if the broker does not report it."""
        ...

    async def health_check(self) -> bool:
        """Whether the broker answers now."""
        ...

    async def close(self) -> None:
        """Return all messages in flight to the broker. Can be repeated, and called before `connect`."""
        ...


class OutgoingMessage(msgspec.Struct, frozen=True):
    """A message to publish."""

    topic: str
    #: None: a tombstone. Only Kafka accepts it.
    body: bytes | None
    headers: Mapping[str, str]
    #: Messages with the same key are written in order. Empty: no ordering.
    key: str = ""
    #: Id of the event, the same in every attempt; brokers that detect duplicates use it.
    message_id: str = ""


class Publisher(Protocol):
    """Producer for one broker. Use it in one event loop, with one `publish` at a time."""

    async def connect(self) -> None:
        """Connect. Raises `BrokerUnavailable` or `BrokerRefused` without retrying."""
        ...

    async def publish(self, messages: Sequence[OutgoingMessage]) -> list[BrokerUnavailable | None]:
        """Publish messages. Returns one answer per message: None if the broker confirmed it, else the error.

        After a message failed, later ones with the same topic and key are not written by this call and fail too.
        Returns within the client's own timeout, whatever the broker does.
        """
        ...

    async def health_check(self) -> bool: ...

    async def close(self) -> None: ...


#: Header of a message whose headers cannot be decoded, with the reason; without them its tenant is unknown.
UNREADABLE: Final = "x-unreadable-headers"
DEAD_REASON: Final = "x-dead-reason"
DEAD_HISTORY: Final = "x-dead-history"
DEAD_SOURCE: Final = "x-dead-source"
DEAD_MESSAGE_ID: Final = "x-dead-message-id"
#: Headers a dead letter has in addition to those of its message.
DEAD_HEADERS: Final = frozenset({DEAD_REASON, DEAD_HISTORY, DEAD_SOURCE, DEAD_MESSAGE_ID})


def tombstone_refused(broker: str) -> BrokerRefused:
    """Build the error for a message without a value, which only Kafka accepts."""
    return BrokerRefused(f"{broker} does not support tombstones (a body of None); publish an empty body instead")


def dead_letter_headers(
    message: RawMessage, source: str, reason: str, history: Sequence[str], *, limit: int | None = None
) -> dict[str, str]:
    """The headers of the message plus reason and history of the dead letter.

    `limit` caps the reason and each history entry, in characters. The whole history is capped at four times `limit`;
    the oldest entries are dropped first.
    """
    return {
        **message.headers,
        DEAD_REASON: reason[:limit],
        DEAD_HISTORY: _encode_history(history, limit),
        DEAD_SOURCE: source,
        DEAD_MESSAGE_ID: message.message_id,
    }


def _encode_history(history: Sequence[str], limit: int | None) -> str:
    entries = [entry[:limit] for entry in history]
    while limit is not None and entries and len(json.dumps(entries)) > 4 * limit:
        entries.pop(0)
    return json.dumps(entries, ensure_ascii=False)


def timestamp_from_ms(milliseconds: int) -> datetime:
    """Convert Unix milliseconds. Returns the current time if they are out of range.

    Some writers use another unit in the same field.
    """
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return datetime.now(UTC)
