"""Run all acceptance criteria on a deployment within a minute, then remove everything they wrote.

Worker processes are ended and everything is removed before `verify_deployment` returns or raises, also if a criterion
fails, a server becomes unreachable or the run is interrupted (Ctrl-C). What could not be removed is reported.

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

#: These wait for a lease to be lost; they run concurrently with the others, on separate queues.
SLOW: Final[tuple[Criterion, ...]] = criteria_jobs.LEASE_CRITERIA

#: In the order in which they run.
CRITERIA: Final[tuple[Criterion, ...]] = (
    *criteria_system.SERVER_CRITERIA,
    *criteria_jobs.LIFE_CRITERIA,
    *criteria_jobs.REPLAY_CRITERIA,
    *criteria_system.OPERATOR_CRITERIA,
    *criteria_system.WIRE_CRITERIA,
    *criteria_system.LEDGER_CRITERIA,
)

#: These check what the others have left.
LAST: Final[tuple[Criterion, ...]] = criteria_system.LAST


#: Timeout of all criteria together; the rest of a minute is for removing what they wrote.
_ALL_S: Final = 35.0
#: Timeout of one criterion; those that wait for leases take longer than others.
_ONE_S: Final = 20.0

#: Called before a criterion with None, and after it with its result.
Progress = Callable[[Criterion, CriterionResult | None], None]


async def verify_deployment(
    settings: Settings, progress: Progress | None = None, left: list[str] | None = None
) -> AcceptanceReport:
    """Check the deployment that these settings describe.

    Adds what could not be removed to `left`, also if it raises. Raises `EngineUnavailable` or `LedgerUnavailable` if a
    server does not answer, `InvalidOption` for wrong settings.
    """
    began = time.monotonic()
    with _quiet():
        sandbox = Sandbox(settings)
        report = AcceptanceReport(namespace=sandbox.name, url=redact(settings.url), ledger=_shown(settings))
        try:
            await sandbox.create()
            async with AcceptanceFixture(sandbox) as fixture:
                await _AcceptanceRun(fixture, report, progress or (lambda *_: None), began + _ALL_S).all()
        finally:
            await _to_its_end(sandbox.remove())
            if left is not None:
                left += map(redact, sandbox.left)
        report.notes = [redact(note) for note in (*sandbox.notes, *sandbox.left)]
        report.seconds = round(time.monotonic() - began, 2)
    return report


class _AcceptanceRun:
    def __init__(
        self, fixture: AcceptanceFixture, report: AcceptanceReport, progress: Progress, deadline: float
    ) -> None:
        self._fixture = fixture
        self._report = report
        self._progress = progress
        self._deadline = deadline

    async def all(self) -> None:
        """Run the slow ones concurrently with the others; the last ones when those have ended."""
        slow = asyncio.gather(*(self._one(criterion) for criterion in SLOW))
        try:
            results = await self._each(
                [*CRITERIA[:1], *await criteria_system.doctor_criteria(self._fixture), *CRITERIA[1:]]
            )
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
        verdict, seen = await self._verdict(criterion, self._deadline - began)
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
                f"not run: the others took {_ALL_S:g} s; check the load of the servers and of this machine",
            )
        try:
            async with asyncio.timeout(min(left_s, _ONE_S)):
                return CriterionStatus.PASSED, await criterion.check(self._fixture)
        except NotApplicable as exc:
            return CriterionStatus.NOT_APPLICABLE, str(exc)
        except (CriterionFailed, HoldfastError) as exc:
            return CriterionStatus.FAILED, str(exc)
        except TimeoutError:
            return CriterionStatus.FAILED, f"did not end within {min(left_s, _ONE_S):.0f} s"
        except Exception as exc:  # noqa: BLE001
            # An error in a criterion is also a result, and must not stop the others.
            return CriterionStatus.FAILED, f"{type(exc).__name__}: {exc}"


async def _to_its_end(removing: Coroutine[None, None, None]) -> None:
    """Await the removal despite cancellations: otherwise data would stay on the user's servers."""
    task = asyncio.create_task(removing)
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    task.result()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log: killed workers and lost leases are expected here."""
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
