"""What `holdfast dev` shows: each job's steps as they happen, read from the feed on a connection of its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from rich.text import Text

from holdfast.cli.follow import Follower
from holdfast.cli.format import instant, shorten, state_text
from holdfast.cli.output import console, note, visible
from holdfast.core.job import Event
from holdfast.core.states import FINAL
from holdfast.engine.port import Engine
from holdfast.errors import EngineUnavailable

_LOOK_S: Final = 0.2
#: More than a person can read in one look: counted instead of shown.
_READABLE: Final = 40


class Stage:
    """Prints while the block runs; what happened up to its end is printed before it is left."""

    def __init__(self, engine: Engine, queues: Sequence[str]) -> None:
        self._engine = engine.sibling()
        self._followers = [Follower(self._engine, queue) for queue in queues]
        #: Only the first event of a job tells the task's name.
        self._names: dict[str, str] = {}
        self._showing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Stage:
        await self._engine.open()
        for follower in self._followers:
            for event in await follower.read():
                self._name(event)
        self._showing = asyncio.create_task(self._show_on())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._showing is not None:
            self._showing.cancel()
            with suppress(asyncio.CancelledError):
                await self._showing
        with suppress(EngineUnavailable):
            await self._show()
        await self._engine.close()

    async def _show_on(self) -> None:
        away = False
        while True:
            try:
                await self._show()
                away = False
            except EngineUnavailable as exc:
                if not away:
                    note(f"the engine does not answer, the worker goes on trying: {exc}")
                away = True
            await asyncio.sleep(_LOOK_S)

    async def _show(self) -> None:
        events = [event for follower in self._followers for event in await follower.read()]
        events.sort(key=lambda event: event.at_ms)
        show_events([(event, self._name(event)) for event in events])

    def _name(self, event: Event) -> str:
        if event.from_state is None and event.data is not None:
            self._names[event.job_id] = str(event.data.get("task", ""))
        if event.to_state in FINAL:
            return self._names.pop(event.job_id, "")
        return self._names.get(event.job_id, "")


def show_events(events: Sequence[tuple[Event, str]]) -> None:
    """A line for each event with its task's name, or their numbers if there are too many."""
    out = console()
    if len(events) > _READABLE:
        counts = Counter(event.type for event, _ in events)
        last, _ = events[-1]
        out.print(instant(last.at_ms), ", ".join(f"{number:,} × {kind}" for kind, number in counts.items()))
        return
    for event, name in events:
        out.print(_line(event, name), soft_wrap=True)


def _line(event: Event, name: str) -> Text:
    happened = state_text(event.to_state) if event.to_state else Text()
    happened.plain = f"{event.type:<16}"
    attempt = f"attempt {event.attempt}" if event.attempt else ""
    cells = (Text(instant(event.at_ms), "dim"), event.job_id, f"{name:<12}", happened, f"{attempt:<10}")
    return Text("  ").join(
        Text(visible(cell)) if isinstance(cell, str) else cell for cell in (*cells, shorten(event.message, 80))
    )
