"""Runs all criteria on a deployment, within a minute, and leaves nothing behind.

Whatever happens (a criterion fails, a server goes away, somebody presses Ctrl-C) worker processes are ended and
everything is removed before `verify_deployment` returns or raises.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from holdfast.acceptance.criteria import CRITERIA, LAST, SLOW, servers
from holdfast.acceptance.model import Criterion, NotApplicable, Report, Result, Unmet, Verdict
from holdfast.acceptance.room import Room
from holdfast.acceptance.stage import Stage
from holdfast.errors import HoldfastError
from holdfast.observe.redact import redact
from holdfast.settings import Settings

#: All criteria together; the rest of a minute is for removing what they wrote.
_ALL_S: Final = 35.0
#: One of them; those that wait for leases need longer than others.
_ONE_S: Final = 20.0

#: Told before a criterion with None, after it with its result.
Progress = Callable[[Criterion, Result | None], None]


async def verify_deployment(
    settings: Settings, progress: Progress | None = None, left: list[str] | None = None
) -> Report:
    """Check the deployment that these settings describe.

    `left` gets what could not be removed again, also if this raises: `EngineUnavailable` or `LedgerUnavailable` if a
    server does not answer, `InvalidOption` for wrong settings.
    """
    began = time.monotonic()
    with _quiet():
        room = Room(settings)
        report = Report(namespace=room.name, url=redact(settings.url), ledger=_shown(settings))
        try:
            await room.make()
            async with Stage(room) as stage:
                await _Run(stage, report, progress or (lambda *_: None), began + _ALL_S).all()
        finally:
            await _to_its_end(room.remove())
            if left is not None:
                left += map(redact, room.left)
        report.notes = [redact(note) for note in (*room.notes, *room.left)]
        report.seconds = round(time.monotonic() - began, 2)
    return report


class _Run:
    def __init__(self, stage: Stage, report: Report, progress: Progress, give_up_at: float) -> None:
        self._stage = stage
        self._report = report
        self._progress = progress
        self._give_up_at = give_up_at

    async def all(self) -> None:
        """The slow ones beside the others; the last ones when all is over."""
        slow = asyncio.gather(*(self._one(criterion) for criterion in SLOW))
        try:
            results = await self._each([*CRITERIA[:1], *await servers.diagnosed(self._stage), *CRITERIA[1:]])
            results += await slow
            results += await self._each(LAST)
        finally:
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)
        self._report.results = results

    async def _each(self, criteria: Sequence[Criterion]) -> list[Result]:
        return [await self._one(criterion) for criterion in criteria]

    async def _one(self, criterion: Criterion) -> Result:
        self._progress(criterion, None)
        began = time.monotonic()
        verdict, seen = await self._verdict(criterion, self._give_up_at - began)
        result = Result(
            id=criterion.id,
            title=criterion.title,
            done=criterion.done,
            verdict=verdict,
            seen=redact(seen),
            seconds=round(time.monotonic() - began, 3),
        )
        self._progress(criterion, result)
        return result

    async def _verdict(self, criterion: Criterion, left_s: float) -> tuple[Verdict, str]:
        if left_s <= 0:
            return Verdict.FAILED, f"not run: the others took {_ALL_S:g} s; the servers, or this machine, are too slow"
        try:
            async with asyncio.timeout(min(left_s, _ONE_S)):
                return Verdict.PASSED, await criterion.check(self._stage)
        except NotApplicable as exc:
            return Verdict.NOT_APPLICABLE, str(exc)
        except (Unmet, HoldfastError) as exc:
            return Verdict.FAILED, str(exc)
        except TimeoutError:
            return Verdict.FAILED, f"did not come to an end within {min(left_s, _ONE_S):.0f} s"
        except Exception as exc:  # noqa: BLE001
            # A criterion that breaks says something about the deployment, too; the others are still of interest.
            return Verdict.FAILED, f"{type(exc).__name__}: {exc}"


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
