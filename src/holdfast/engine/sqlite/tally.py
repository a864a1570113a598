"""What settlements add to a process's counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.core.states import State
from holdfast.core.verdict import TARGETS, Answer, Settlement
from holdfast.observe.counts import Counts

_FIELDS: Final = {
    State.SUCCEEDED: "succeeded",
    State.RETRYING: "retried",
    State.DLQ_PENDING: "dead",
    State.SUSPENDED: "suspended",
    State.WAITING_APPROVAL: "held",
    State.QUEUED: "released",
}


def count_answers(counts: Counts, settlements: Sequence[Settlement], answers: Sequence[Answer]) -> None:
    """Applied ones by what they led to; stale ones apart; second copies were counted the first time."""
    for settlement, answer in zip(settlements, answers, strict=True):
        if answer is Answer.APPLIED:
            name = _FIELDS[TARGETS[type(settlement.verdict)]]
            setattr(counts, name, getattr(counts, name) + 1)
        elif answer is Answer.STALE:
            counts.stale_settles += 1
