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
    """A message as the broker has it. Two deliveries of one message are two of these."""

    #: The same for every delivery of the message, and for no other message of this broker and queue.
    message_id: str
    #: None: a tombstone, Kafka's message without a value. Not the same as an empty body.
    body: bytes | None
    #: Names are lower case; of a name that comes twice the last value counts.
    headers: Mapping[str, str]
    #: When it was written, by the broker's or the writer's clock; when it was received, if the broker does not say.
    timestamp: datetime
    #: The broker's own: topic, partition and offset; exchange and routing key; receipt handle …
    metadata: Mapping[str, Any]
    #: Messages of one key are handed over in the order in which they come; empty: no order is asked for.
    key: str = ""
    #: How often it has been delivered, this time included, as far as the broker counts.
    deliveries: int = 1


class QueueAdapter(Protocol):
    """The consuming end of one queue (requirement T1). One event loop; one `consume` at a time.

    At least once: what is neither acknowledged nor refused is delivered again, to this consumer or to another one of
    its group, after a reconnection or a restart.
    """

    async def connect(self) -> None:
        """Connect and find the queue. `BrokerUnavailable` or `BrokerRefused` says why not, at once."""
        ...

    def consume(self) -> AsyncIterator[RawMessage]:
        """Messages as they come, for ever; ends after `close`. Loss of the connection is mended inside.

        No more than `prefetch` are out of the broker's hands and not yet acknowledged or refused.
        """
        ...

    async def ack(self, message: RawMessage) -> None:
        """Done with it. Of a message that is no longer ours (reconnected, rebalanced): nothing happens."""
        ...

    async def nack(self, message: RawMessage, requeue: bool = False) -> None:
        """Not done. `requeue`: deliver it again, soon; else: drop it as the broker drops messages (to its own dead
        letters, if it is set up so; where a broker knows no such thing, as `ack`)."""
        ...

    async def send_to_dlq(self, message: RawMessage, reason: str, history: Sequence[str] = ()) -> None:
        """Write it to the queue's dead letters with reason and history; once that is confirmed, acknowledge it.

        Body and headers stay as they are; added are `x-dead-reason`, `x-dead-history` (a JSON list), `x-dead-source`
        and `x-dead-message-id`. If the dead letters cannot be written it raises, and the message is still ours.
        """
        ...

    def owns(self, message: RawMessage) -> bool:
        """Whether an `ack` of it would still count. What is lost is delivered to somebody else, so drop it."""
        ...

    async def pause(self) -> None:
        """Deliver nothing until `resume`, and stay a living member of the group all the while."""
        ...

    async def resume(self) -> None: ...

    async def lag(self) -> int | None:
        """How many messages wait for this group; None: the broker does not say."""
        ...

    async def health_check(self) -> bool:
        """Whether the broker answers now."""
        ...

    async def close(self) -> None:
        """Give everything back; safe to call twice, and before `connect`. What is in hand is for others from now on."""
        ...


class OutgoingMessage(msgspec.Struct, frozen=True):
    """A message to be published."""

    topic: str
    #: None: a tombstone. Brokers other than Kafka refuse it.
    body: bytes | None
    headers: Mapping[str, str]
    #: Written in order, message by message; empty: no order is asked for.
    key: str = ""
    #: Of the event, the same in every try; brokers that know duplicates know it by this.
    message_id: str = ""


class Publisher(Protocol):
    """The publishing end of one broker. One event loop; one `publish` at a time."""

    async def connect(self) -> None:
        """Connect. `BrokerUnavailable` or `BrokerRefused` says why not, at once."""
        ...

    async def publish(self, messages: Sequence[OutgoingMessage]) -> list[BrokerUnavailable | None]:
        """One answer for each: None once the broker has confirmed that it is safe, else why not.

        After one that failed, no later one of the same topic and key is written by this call: it fails, too. Comes back
        within the client's own timeout, whatever the broker does.
        """
        ...

    async def health_check(self) -> bool: ...

    async def close(self) -> None: ...


DEAD_REASON: Final = "x-dead-reason"
DEAD_HISTORY: Final = "x-dead-history"
DEAD_SOURCE: Final = "x-dead-source"
DEAD_MESSAGE_ID: Final = "x-dead-message-id"
#: What a dead letter has and its message had not.
DEAD_HEADERS: Final = frozenset({DEAD_REASON, DEAD_HISTORY, DEAD_SOURCE, DEAD_MESSAGE_ID})


def tombstone_refused(broker: str) -> BrokerRefused:
    """For a message without a value, where only Kafka has such."""
    return BrokerRefused(f"{broker} does not know tombstones (a body of None); publish an empty body instead")


def dead_letter_headers(
    message: RawMessage, source: str, reason: str, history: Sequence[str], *, limit: int | None = None
) -> dict[str, str]:
    """The message's own headers, and its story: why it is dead and what was tried.

    `limit`: so many characters of the reason and of each try, and four times as many of all tries, the latest ones.
    """
    return {
        **message.headers,
        DEAD_REASON: reason[:limit],
        DEAD_HISTORY: _told(history, limit),
        DEAD_SOURCE: source,
        DEAD_MESSAGE_ID: message.message_id,
    }


def _told(history: Sequence[str], limit: int | None) -> str:
    lines = [line[:limit] for line in history]
    while limit is not None and lines and len(json.dumps(lines)) > 4 * limit:
        lines.pop(0)
    return json.dumps(lines, ensure_ascii=False)


def timestamp_from_ms(milliseconds: int) -> datetime:
    """The time so long after 1970; now, if no calendar has it: writers put other units into the same field."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return datetime.now(UTC)
