"""What became of many, as answers tell it."""

from __future__ import annotations

import msgspec

from holdfast.dlq.many import Report


class OneOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one."""

    id: str
    done: bool
    #: The job that it is now, if it is one.
    job_id: str = ""
    code: str = ""
    message: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of all."""

    #: How many there were before anything was done.
    matched: int
    done: int
    failed: int
    dry_run: bool
    #: Why the rest was left as it is.
    stopped: str
    results: list[OneOutcome]


def outcome(report: Report) -> Outcome:
    """A report of the offices."""
    results = [
        OneOutcome(id=each.id, done=each.done, job_id=each.job_id, code=each.code, message=each.message)
        for each in report.results
    ]
    return Outcome(
        matched=report.matched,
        done=report.done,
        failed=report.failed,
        dry_run=report.dry_run,
        stopped=report.stopped,
        results=results,
    )
