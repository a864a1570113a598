"""All triggers of a file in one process: `holdfast trigger run`.

A trigger that cannot connect at the start ends them all, with the reasons of all that cannot: a wrong address is told
at once. From then on each finds its broker again by itself. While they run, the ledger is told that they are here and
how they are, and tells which of them people have paused; while it does not answer nothing changes, and without a ledger
they run all the same: only `holdfast trigger status`, `pause` and `resume` need one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.clock import Clock, SystemClock
from holdfast.errors import BrokerUnavailable, HoldfastError
from holdfast.identity import new_identity
from holdfast.ledger.trigger_book import Presence, TriggerBook
from holdfast.triggers.building import Built, build, told_together
from holdfast.triggers.config import TriggerEntry

if TYPE_CHECKING:
    from holdfast.app import Holdfast

_log: Final = logging.getLogger("holdfast.trigger")

#: How often a process says that it is here, and hears of pauses.
REPORT_S: Final = 2.0
#: Whoever has not been heard of for so long is taken off the list.
_FORGET_MS: Final = 60_000
#: A store that has not answered by then is asked again at the next turn.
_PATIENCE_S: Final = 5.0


class TriggersReadiness(msgspec.Struct, frozen=True, kw_only=True):
    """Whether messages can be handed over."""

    ready: bool
    #: Triggers that cannot.
    failing: list[str]


class Triggers:
    """Triggers of one process, from start to stop. One event loop; the app is open."""

    def __init__(
        self,
        app: Holdfast,
        entries: Sequence[TriggerEntry],
        *,
        report_s: float = REPORT_S,
        clock: Clock | None = None,
    ) -> None:
        """Raises `InvalidOption` with all that is wrong: tasks that the app does not have, functions that are not
        there."""
        self._book: TriggerBook | None = None if app.ledger_port is None else app.ledger_port.triggers
        self._built = _all(app, entries)
        self._report_s = report_s
        self._clock = clock or SystemClock()
        self.process = new_identity()
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()
        #: The last that was heard of people's wishes.
        self._paused: set[str] = set()
        self._running = False
        app.engine.counts.triggers.update(
            (each.entry.name, each.trigger.counts) for each in self._built if each.entry.metrics.enabled
        )

    @property
    def ready(self) -> bool:
        """Whether every trigger can hand messages over; False before the start and from the first `stop` on."""
        return self._running and not self._stopping.is_set() and all(each.trigger.ready for each in self._built)

    async def readiness(self) -> TriggersReadiness:
        """For `/readyz`."""
        return TriggersReadiness(
            ready=self.ready, failing=[each.entry.name for each in self._built if not each.trigger.ready]
        )

    def stop(self) -> None:
        """Take nothing new, finish what is in hand, end. A second call does not wait for what is in hand."""
        if self._stopping.is_set():
            _log.info("the triggers do not wait for what is in hand")
            self._hurrying.set()
        else:
            _log.info("the triggers stop; %d messages are in hand", sum(each.trigger.in_hand for each in self._built))
        self._stopping.set()

    async def run(self) -> None:
        """Until stopped. Raises what a trigger's first connection raises, with the reasons of all that failed."""
        await self._hear_of_pauses()
        try:
            await self._start()
            self._running = True
            async with asyncio.TaskGroup() as group:
                reporting = group.create_task(self._report_for_ever())
                await self._stopping.wait()
                reporting.cancel()
        finally:
            self._running = False
            await self._stop()

    # Start -------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        started = await asyncio.gather(*(self._start_one(each) for each in self._built), return_exceptions=True)
        failed = {
            each.entry.name: error
            for each, error in zip(self._built, started, strict=True)
            if isinstance(error, Exception)
        }
        if failed:
            raise told_together(failed)

    async def _start_one(self, built: Built) -> None:
        entry = built.entry
        await built.trigger.start()
        if entry.name in self._paused:
            # Nothing else has had its turn since it was started: it has handed nothing over.
            await built.trigger.pause()
        _log.info(
            "trigger %s started: %s queue %s, group %s, to %s, %d at a time%s",
            entry.name,
            entry.adapter.type,
            entry.queue_name,
            entry.consumer_group,
            entry.runtime.kind,
            entry.concurrency,
            " (paused)" if entry.name in self._paused else "",
        )

    # While they run ----------------------------------------------------------------------------------

    async def _report_for_ever(self) -> None:
        if self._book is None:
            return
        while True:
            # Together: each asks its broker, and one that does not answer takes seconds to say so.
            presences = await asyncio.gather(*(self._presence(each) for each in self._built))
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    paused = await self._book.report(presences, forget_after_ms=_FORGET_MS)
                await self._follow(paused)
            except (HoldfastError, TimeoutError) as exc:
                _log.warning(
                    "the ledger could not be told of this process's triggers: %s", str(exc) or "no answer in time"
                )
            await asyncio.sleep(self._report_s)

    async def _presence(self, built: Built) -> Presence:
        return Presence(
            name=built.entry.name,
            process=self.process,
            queue_name=built.entry.queue_name,
            adapter=built.entry.adapter.type,
            health=msgspec.to_builtins(await built.trigger.health()),
            seen_at_ms=self._clock.now_ms(),
        )

    async def _follow(self, paused: set[str]) -> None:
        """Do what people have asked for since the last time; what does not work is tried again the next time."""
        for built in self._built:
            name, trigger = built.entry.name, built.trigger
            if (name in paused) == (name in self._paused):
                continue
            _log.info("trigger %s is %s by a person", name, "paused" if name in paused else "resumed")
            try:
                await (trigger.pause() if name in paused else trigger.resume())
            except BrokerUnavailable as exc:
                _log.warning("trigger %s: the broker's client does not follow yet: %s", name, exc)
                continue
            self._paused ^= {name}

    async def _hear_of_pauses(self) -> None:
        """Before the start: what is paused must not begin."""
        if self._book is None:
            return
        try:
            async with asyncio.timeout(_PATIENCE_S):
                self._paused = {pause.name for pause in await self._book.pauses()}
        except (HoldfastError, TimeoutError) as exc:
            _log.warning("whether triggers are paused is not known, so they start: %s", str(exc) or "no answer in time")

    # Stop --------------------------------------------------------------------------------------------

    async def _stop(self) -> None:
        stops = [asyncio.create_task(each.trigger.stop()) for each in self._built]
        hurry = asyncio.create_task(self._hurry())
        try:
            for each, outcome in zip(self._built, await asyncio.gather(*stops, return_exceptions=True), strict=True):
                if isinstance(outcome, Exception):
                    _log.error("trigger %s did not stop well: %s", each.entry.name, outcome)
        finally:
            hurry.cancel()
        for each in self._built:
            await each.close()
        if self._book is not None:
            with suppress(HoldfastError, TimeoutError):
                async with asyncio.timeout(_PATIENCE_S):
                    await self._book.leave(self.process)

    async def _hurry(self) -> None:
        await self._hurrying.wait()
        for each in self._built:
            each.trigger.hurry()


def _all(app: Holdfast, entries: Sequence[TriggerEntry]) -> list[Built]:
    built: list[Built] = []
    failed: dict[str, Exception] = {}
    for entry in entries:
        try:
            built.append(build(app, entry))
        except HoldfastError as exc:
            failed[entry.name] = exc
    if failed:
        raise told_together(failed)
    return built
