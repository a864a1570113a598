"""State of a trigger and of its messages: life cycle, health, counters, retry delays (T4, M1).

`InFlightMessage` is one delivery and what is known of it so far. `error_reason` gives a failure as one redacted line
that is safe in headers and rows. The `queue_*` metrics are computed from `TriggerCounters` when they are read.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

import msgspec

from holdfast.brokers.port import RawMessage
from holdfast.core.retry import Backoff
from holdfast.core.text import clean
from holdfast.errors import Denied, Fatal, IntakeRefused, Unavailable, UsageError
from holdfast.ledger.port.messages import ExecutionStatus
from holdfast.observe.counters import Histogram
from holdfast.observe.redact import redact_and_truncate
from holdfast.triggers.config import AckPolicy
from holdfast.triggers.dedup import DedupTicket
from holdfast.triggers.envelope import MessageEnvelope
from holdfast.triggers.runtime import RuntimeCall, RuntimeResult

#: A history keeps this many tries: the first ones and the latest ones.
_FIRST: Final = 5
_LATEST: Final = 20


class Disposition(msgspec.Struct, frozen=True):
    """What is still to be told to the broker, and then recorded."""

    how: AckPolicy
    status: ExecutionStatus
    reason: str = ""


class RetryAfter(msgspec.Struct, frozen=True):
    """Not off yet: look at it again after so long. Its key waits with it."""

    delay_s: float


class OnHold(msgspec.Struct, frozen=True):
    """Something is down that has nothing to do with the message."""

    reason: str


#: What a look at a message leads to; `off`: nothing more is to be done.
Next = RetryAfter | OnHold | Literal["off"]


class InFlightMessage:
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
        self.call: RuntimeCall | None = None
        self.trace_id = ""
        #: When it was first looked at: by the wall clock, and by one that does not jump.
        self.started_at_ms = 0
        self.began_s = 0.0
        #: Tries of the hand-over after the first one, and why each failed.
        self.retries = 0
        self.history: list[str] = []
        #: The reservation of its key, and what came of its run.
        self.ticket: DedupTicket | None = None
        self.run: RuntimeResult | None = None
        self.ending: Disposition | None = None
        #: How often somebody else was at its key.
        self.looks = 0
        #: Between two tries to write its dead letter.
        self.patience: Backoff | None = None

    @property
    def key(self) -> str:
        """Messages of one key come one after the other."""
        return self.raw.key

    def add_failure(self, failure: str) -> None:
        """One more try that failed; bounded, so that a message with many retries stays small."""
        self.history.append(failure)
        if len(self.history) > _FIRST + _LATEST:
            del self.history[_FIRST]


REASON_LIMIT: Final = 1_000


def error_reason(exc: BaseException) -> str:
    """Why, in one line: what follows the first line of an error may quote the message."""
    try:
        text = str(exc)
    except Exception:  # noqa: BLE001 - an error without words is a failed try all the same
        text = ""
    text = " ".join(text.split()) if isinstance(exc, Denied) else text.partition("\n")[0]
    if not isinstance(exc, Denied | UsageError | Unavailable | Fatal | IntakeRefused):
        text = f"{type(exc).__name__}: {text}" if text else type(exc).__name__
    # Clean: it is to be written into headers and rows, and what cannot be encoded would hold the message for ever.
    return redact_and_truncate(clean(text), REASON_LIMIT)


def retry_delay_s(base: float, multiplier: float, number: int, cap_s: float) -> float:
    """base × multiplier^number, but no longer than the cap."""
    try:
        return min(cap_s, base * multiplier**number)
    except OverflowError:
        return cap_s


class TriggerState(StrEnum):
    """Where a trigger is in its life."""

    NEW = "new"
    RUNNING = "running"
    PAUSED = "paused"
    #: Something is down that messages would be handed over to; it goes on by itself.
    HOLDING = "holding"
    STOPPING = "stopping"
    STOPPED = "stopped"


class TriggerHealth(msgspec.Struct, frozen=True):
    """How it is, now. JSON: `msgspec.to_builtins`."""

    #: `healthy`, `paused`, `holding`, `unhealthy` (the broker does not answer) or `stopped`.
    status: str
    running: bool
    adapter_healthy: bool
    active_workers: int
    paused: bool


@dataclass(slots=True)
class TriggerCounters:
    """Since the trigger was made. One queue."""

    queue: str
    #: Messages that the broker has delivered, and those that it was told are done.
    received: int = 0
    acknowledged: int = 0
    #: Messages that are off, by what became of them.
    consumed: dict[ExecutionStatus, int] = field(default_factory=lambda: dict.fromkeys(ExecutionStatus, 0))
    #: Messages that somebody had handed over before.
    dedup_hits: int = 0
    #: Tries of a hand-over, those that failed included; and those after a first one.
    calls: int = 0
    retries: int = 0
    #: From the first look at a message to its end, in seconds.
    durations: Histogram = field(default_factory=Histogram)
    #: From when a message was written to when it was received.
    delays: Histogram = field(default_factory=Histogram)
    #: Loops that are ready to hand messages over.
    active_workers: int = 0
    #: Messages in hand now, and those of them that wait because something is down.
    in_flight: int = 0
    held: int = 0
    #: Written to the queue's dead letters.
    dead_letters: int = 0
    #: Deliveries that somebody else owns by now: dropped.
    lost_messages: int = 0
    #: Messages that wait at the broker; None: it does not say.
    lag: int | None = None
    #: Rows of `queue_executions` that were dropped because the ledger was away for too long.
    records_lost: int = 0
