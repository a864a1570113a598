"""How long runs took, counted once the engine has applied their verdicts: the numbers of runs and of results agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.core.verdict import TARGETS, Answer, DeadLetter, RetryLater, Succeed
from holdfast.observe.counts import Counts
from holdfast.worker.run import Run

#: Runs that were given back, held or suspended took their time for nothing yet.
_FIELDS: Final[dict[type, str]] = {Succeed: "run_succeeded", RetryLater: "run_retried", DeadLetter: "run_dead"}


def count_runs(counts: Counts, runs: Sequence[Run], answers: Sequence[Answer]) -> None:
    """These are settled. In the hot path: one short loop for a batch."""
    took: dict[type, list[float]] = {verdict: [] for verdict in TARGETS}
    for run, answer in zip(runs, answers, strict=True):
        if answer is Answer.APPLIED and run.settlement is not None:
            took[type(run.settlement.verdict)].append(run.took_s)
        if run.trace is not None:
            run.trace.settled(answer)
    for verdict, field in _FIELDS.items():
        if took[verdict]:
            getattr(counts, field).add(took[verdict])
