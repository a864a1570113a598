"""Run all acceptance criteria on a deployment within a minute, then remove everything they wrote.

Also if a criterion fails, a server becomes unreachable or the run is interrupted (Ctrl-C), worker processes are ended
and everything is removed before `verify_deployment` returns or raises. What could not be removed is reported.

Criteria run in the order of `CRITERIA`. The `SLOW` ones, which wait for leases to expire, run concurrently on separate
queues; the `LAST` ones run when all others have ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.observe.redact import redact
from holdfast.settings import Settings
from holdfast.verification.acceptance import criteria_jobs, criteria_system
from holdfast.verification.acceptance.fixture import (
    AcceptanceFixture,
    AcceptanceReport,
    Criterion,
    CriterionFailed,
    CriterionResult,
    CriterionStatus,
    NotApplicable,
)
from holdfast.verification.acceptance.sandbox import Sandbox

#: Those that wait for a lease to be lost; they run beside the others, on queues of their own.
SLOW: Final[tuple[Criterion, ...]] = criteria_jobs.LEASE_CRITERIA

#: The last ones look at what the others have left.
CRITERIA: Final[tuple[Criterion, ...]] = (
    *criteria_system.SERVER_CRITERIA,
    *criteria_jobs.LIFE_CRITERIA,
    *criteria_jobs.REPLAY_CRITERIA,
    *criteria_system.OPERATOR_CRITERIA,
    *criteria_system.WIRE_CRITERIA,
    *criteria_system.LEDGER_CRITERIA,
)

LAST: Final[tuple[Criterion, ...]] = criteria_system.LAST


#: All criteria together; the rest of a minute is for removing what they wrote.
_ALL_S: Final = 35.0
#: One of them; those that wait for leases need longer than others.
_ONE_S: Final = 20.0

#: Told before a criterion with None, after it with its result.
Progress = Callable[[Criterion, CriterionResult | None], None]


async def verify_deployment(
    settings: Settings, progress: Progress | None = None, left: list[str] | None = None
) -> AcceptanceReport:
    """Check the deployment that these settings describe.

    `left` gets what could not be removed again, also if this raises: `EngineUnavailable` or `LedgerUnavailable` if a
    server does not answer, `InvalidOption` for wrong settings.
    """
    began = time.monotonic()
    with _quiet():
        room = Sandbox(settings)
        report = AcceptanceReport(namespace=room.name, url=redact(settings.url), ledger=_shown(settings))
        try:
            await room.create()
            async with AcceptanceFixture(room) as stage:
                await _AcceptanceRun(stage, report, progress or (lambda *_: None), began + _ALL_S).all()
        finally:
            await _to_its_end(room.remove())
            if left is not None:
                left += map(redact, room.left)
        report.notes = [redact(note) for note in (*room.notes, *room.left)]
        report.seconds = round(time.monotonic() - began, 2)
    return report


class _AcceptanceRun:
    def __init__(
        self, stage: AcceptanceFixture, report: AcceptanceReport, progress: Progress, give_up_at: float
    ) -> None:
        self._stage = stage
        self._report = report
        self._progress = progress
        self._give_up_at = give_up_at

    async def all(self) -> None:
        """The slow ones beside the others; the last ones when all is over."""
        slow = asyncio.gather(*(self._one(criterion) for criterion in SLOW))
        try:
            results = await self._each([*CRITERIA[:1], *await criteria_system.diagnosed(self._stage), *CRITERIA[1:]])
            results += await slow
            results += await self._each(LAST)
        finally:
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)
        self._report.results = results

    async def _each(self, criteria: Sequence[Criterion]) -> list[CriterionResult]:
        return [await self._one(criterion) for criterion in criteria]

    async def _one(self, criterion: Criterion) -> CriterionResult:
        self._progress(criterion, None)
        began = time.monotonic()
        verdict, seen = await self._verdict(criterion, self._give_up_at - began)
        result = CriterionResult(
            id=criterion.id,
            title=criterion.title,
            done=criterion.done,
            verdict=verdict,
            seen=redact(seen),
            seconds=round(time.monotonic() - began, 3),
        )
        self._progress(criterion, result)
        return result

    async def _verdict(self, criterion: Criterion, left_s: float) -> tuple[CriterionStatus, str]:
        if left_s <= 0:
            return (
                CriterionStatus.FAILED,
                f"not run: the others took {_ALL_S:g} s; the servers, or this machine, are too slow",
            )
        try:
            async with asyncio.timeout(min(left_s, _ONE_S)):
                return CriterionStatus.PASSED, await criterion.check(self._stage)
        except NotApplicable as exc:
            return CriterionStatus.NOT_APPLICABLE, str(exc)
        except (CriterionFailed, HoldfastError) as exc:
            return CriterionStatus.FAILED, str(exc)
        except TimeoutError:
            return CriterionStatus.FAILED, f"did not come to an end within {min(left_s, _ONE_S):.0f} s"
        except Exception as exc:  # noqa: BLE001
            # A criterion that breaks says something about the deployment, too; the others are still of interest.
            return CriterionStatus.FAILED, f"{type(exc).__name__}: {exc}"


async def _to_its_end(removing: Coroutine[None, None, None]) -> None:
    """Even if we are cancelled meanwhile, however often: what is left behind would be on the user's servers."""
    task = asyncio.create_task(removing)
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    task.result()


@contextmanager
def _quiet() -> Iterator[None]:
    """Killed workers and lost leases are what is asked for here: nobody wants to read of them in the log."""
    logger = logging.getLogger("holdfast")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def _shown(settings: Settings) -> str | None:
    if settings.embedded:
        return "in the engine's file"
    return None if settings.ledger is None else redact(settings.ledger)
