"""A message in hand, and what is known of it by now."""

from __future__ import annotations

import logging
from typing import Final, Literal

import msgspec

from holdfast.brokers.port import RawMessage
from holdfast.core.backoff import Backoff
from holdfast.ledger.trigger_book import Status
from holdfast.triggers.config import AckPolicy
from holdfast.triggers.dedup import Ticket
from holdfast.triggers.envelope import MessageEnvelope
from holdfast.triggers.runtime import Call, Run

#: A history keeps this many tries: the first ones and the latest ones.
_FIRST: Final = 5
_LATEST: Final = 20


class Ending(msgspec.Struct, frozen=True):
    """What is still to be told to the broker, and then recorded."""

    how: AckPolicy
    status: Status
    reason: str = ""


class Again(msgspec.Struct, frozen=True):
    """Not off yet: look at it again after so long. Its key waits with it."""

    delay_s: float


class Held(msgspec.Struct, frozen=True):
    """Something is down that has nothing to do with the message."""

    reason: str


#: What a look at a message leads to; `off`: nothing more is to be done.
Next = Again | Held | Literal["off"]


class Item:
    """One delivery."""

    __slots__ = (
        "began_s",
        "call",
        "ending",
        "envelope",
        "history",
        "level",
        "looks",
        "patience",
        "raw",
        "retries",
        "run",
        "started_at_ms",
        "ticket",
        "trace_id",
    )

    def __init__(self, raw: RawMessage) -> None:
        self.raw = raw
        #: At which its steps are logged.
        self.level = logging.DEBUG
        #: Once it is parsed.
        self.envelope: MessageEnvelope | None = None
        self.call: Call | None = None
        self.trace_id = ""
        #: When it was first looked at: by the wall clock, and by one that does not jump.
        self.started_at_ms = 0
        self.began_s = 0.0
        #: Tries of the hand-over after the first one, and why each failed.
        self.retries = 0
        self.history: list[str] = []
        #: The reservation of its key, and what came of its run.
        self.ticket: Ticket | None = None
        self.run: Run | None = None
        self.ending: Ending | None = None
        #: How often somebody else was at its key.
        self.looks = 0
        #: Between two tries to write its dead letter.
        self.patience: Backoff | None = None

    @property
    def key(self) -> str:
        """Messages of one key come one after the other."""
        return self.raw.key

    def remember(self, failure: str) -> None:
        """One more try that failed; bounded, so that a message with many retries stays small."""
        self.history.append(failure)
        if len(self.history) > _FIRST + _LATEST:
            del self.history[_FIRST]
