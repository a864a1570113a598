"""What is the same on every broker about what is written: headers of dead letters, and tombstones."""

from __future__ import annotations

import json
from collections.abc import Sequence

from holdfast.brokers.port import RawMessage
from holdfast.errors import BrokerRefused


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
        "x-dead-reason": reason[:limit],
        "x-dead-history": _told(history, limit),
        "x-dead-source": source,
        "x-dead-message-id": message.message_id,
    }


def _told(history: Sequence[str], limit: int | None) -> str:
    lines = [line[:limit] for line in history]
    while limit is not None and lines and len(json.dumps(lines)) > 4 * limit:
        lines.pop(0)
    return json.dumps(lines, ensure_ascii=False)
