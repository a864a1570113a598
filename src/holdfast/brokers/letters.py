"""What is the same on every broker about what is written: headers of dead letters, and tombstones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from holdfast.brokers.port import RawMessage
from holdfast.errors import BrokerRefused

DEAD_REASON: Final = "x-dead-reason"
DEAD_HISTORY: Final = "x-dead-history"
DEAD_SOURCE: Final = "x-dead-source"
DEAD_MESSAGE_ID: Final = "x-dead-message-id"
#: What a dead letter has and its message had not.
DEAD_HEADERS: Final = frozenset({DEAD_REASON, DEAD_HISTORY, DEAD_SOURCE, DEAD_MESSAGE_ID})


def tombstone_refused(broker: str) -> BrokerRefused:
    """For a message without a value, where only Kafka has such."""
    return BrokerRefused(f"{broker} does not know tombstones (a body of None); publish an empty body instead")


def dead_headers(
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
