"""What settlements add to a process's counters, on every engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from holdfast.core.verdict import (
    Answer,
    DeadLetter,
    Hold,
    Release,
    RetryLater,
    Settlement,
    Succeed,
    Suspend,
)
from holdfast.observe.counts import Counts

_FIELDS: Final[dict[type, str]] = {
    Succeed: "succeeded",
    RetryLater: "retried",
    DeadLetter: "dead",
    Suspend: "suspended",
    Hold: "held",
    Release: "released",
}


def count_answers(counts: Counts, settlements: Sequence[Settlement], answers: Sequence[Answer]) -> None:
    """Applied ones by their verdict; stale ones apart; second copies were counted the first time."""
    applied = Counter(
        type(settlement.verdict)
        for settlement, answer in zip(settlements, answers, strict=True)
        if answer is Answer.APPLIED
    )
    for verdict, number in applied.items():
        name = _FIELDS[verdict]
        setattr(counts, name, getattr(counts, name) + number)
    counts.stale_settles += answers.count(Answer.STALE)
