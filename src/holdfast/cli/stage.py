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
from holdfast.cli.output import console, note
from holdfast.core.job import Event
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
        self._showing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Stage:
        await self._engine.open()
        for follower in self._followers:
            await follower.skip()
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
        while True:
            try:
                await self._show()
            except EngineUnavailable as exc:
                note(f"the engine does not answer, the worker tries again: {exc}")
            await asyncio.sleep(_LOOK_S)

    async def _show(self) -> None:
        events = [event for follower in self._followers for event in await follower.read()]
        events.sort(key=lambda event: event.at_ms)
        out = console()
        if len(events) > _READABLE:
            counts = ", ".join(f"{number:,} {kind}" for kind, number in Counter(event.type for event in events).items())
            out.print(f"{instant(events[-1].at_ms)}  {counts}")
            return
        for event in events:
            out.print(_line(event))


def _line(event: Event) -> Text:
    state = state_text(event.to_state) if event.to_state else Text("–")
    attempt = f"attempt {event.attempt}" if event.attempt else ""
    return Text("  ").join(
        [
            Text(instant(event.at_ms), "dim"),
            Text(event.job_id),
            Text(f"{event.type:<16}"),
            state,
            Text(attempt),
            Text(shorten(event.message, 80)),
        ]
    )
