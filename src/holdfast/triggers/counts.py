"""What one trigger counts; `queue_*` of the metrics is made of it when somebody asks (requirement M1)."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.ledger.trigger_book import Status
from holdfast.observe.counts import Durations


@dataclass(slots=True)
class TriggerCounts:
    """Since the trigger was made. One queue."""

    queue: str
    #: Messages that the broker has delivered, and those that it was told are done.
    received: int = 0
    acknowledged: int = 0
    #: Messages that are off, by what became of them.
    consumed: dict[Status, int] = field(default_factory=lambda: dict.fromkeys(Status, 0))
    #: Messages that somebody had handed over before.
    dedup_hits: int = 0
    #: Tries of a hand-over, those that failed included; and those after a first one.
    calls: int = 0
    retries: int = 0
    #: From the first look at a message to its end, in seconds.
    durations: Durations = field(default_factory=Durations)
    #: From when a message was written to when it was received.
    delays: Durations = field(default_factory=Durations)
    #: Loops that are ready to hand messages over.
    active_workers: int = 0
    #: Messages in hand now, and those of them that wait because something is down.
    in_hand: int = 0
    held: int = 0
    #: Written to the queue's dead letters.
    dead_letters: int = 0
    #: Deliveries that somebody else owns by now: dropped.
    disowned: int = 0
    #: Messages that wait at the broker; None: it does not say.
    lag: int | None = None
    #: Rows of `queue_executions` that were dropped because the ledger was away for too long.
    records_lost: int = 0
