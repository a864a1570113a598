"""Live output of `holdfast jobs watch` and `holdfast dev`, read from the engine's feeds.

`FeedFollower` attaches no reader. A feed without one is bounded, so a slow follower may miss entries: rates are then
too low, nothing else is affected.

`jobs watch` shows open jobs from the engine, ended ones from the ledger and rates from the feeds. `dev` prints each
event as it happens, over a separate connection.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.live import Live
from rich.text import Text

from holdfast.cli.command import ExitCode
from holdfast.cli.output import (
    as_cards,
    as_table,
    console,
    emit_json_line,
    instant,
    note,
    now_ms,
    on_terminal,
    shorten,
    state_text,
    visible,
)
from holdfast.cli.session import queues_or_all
from holdfast.clock import iso
from holdfast.core.job import Event
from holdfast.core.states import FINAL, State, event_for
from holdfast.engine.port import Engine
from holdfast.engine.port.reads import QueueStats
from holdfast.errors import EngineUnavailable, LedgerUnavailable

if TYPE_CHECKING:
    from holdfast.ledger.queries.jobs import Queries
    from holdfast.ledger.queries.records import StateCounts


_PAGE: Final = 200
#: Getting to the end of a long feed may take a while; longer than this no screen should stand still.
_PATIENCE_S: Final = 2.0


class FeedFollower:
    """The events of one queue that happened after `skip`."""

    def __init__(self, engine: Engine, queue: str) -> None:
        self._engine = engine
        self._queue = queue
        self._position = ""

    async def skip(self) -> None:
        """Go to the end of the feed as it is now."""
        await self._read(keep=False)

    async def read(self) -> list[Event]:
        """What was appended since the last call."""
        return await self._read(keep=True)

    async def _read(self, *, keep: bool) -> list[Event]:
        events: list[Event] = []
        give_up_at = time.monotonic() + _PATIENCE_S
        while time.monotonic() < give_up_at:
            entries = await self._engine.read_feed(self._queue, self._position, _PAGE)
            new = [entry for entry in entries if entry.position != self._position]
            if not new:
                break
            self._position = new[-1].position
            if keep:
                events += [event for entry in new for event in entry.events]
            if len(entries) < _PAGE:
                break
        return events


#: States that a job leaves by itself; a queue without them is empty, whatever is parked in it.
_MOVING: Final = (State.QUEUED, State.RUNNING, State.RETRYING, State.DLQ_PENDING, State.DLQ_RECORDED)
#: Between two counts of the ledger passes this many times what one takes.
_COUNT_SHARE: Final = 9
#: Column → the event that is counted for it.
_RATES: Final = {
    "created": event_for(None, State.QUEUED),
    "succeeded": event_for(State.RUNNING, State.SUCCEEDED),
    "retried": event_for(State.RUNNING, State.RETRYING),
    "failed": event_for(State.DLQ_RECORDED, State.FAILED),
    "cancelled": event_for(State.QUEUED, State.CANCELLED),
}


@dataclass(frozen=True, slots=True)
class QueueSample:
    """One queue at one look."""

    stats: QueueStats
    rates: dict[str, float]
    #: Jobs that have ended; None where no ledger counts them.
    ended: StateCounts | None

    def count(self, state: State) -> int | None:
        """Jobs in this state; None if that is not known."""
        if state not in FINAL:
            return self.stats.states.get(state, 0)
        return None if self.ended is None else self.ended.states[state]


@dataclass(frozen=True, slots=True)
class WatchSample:
    """All queues at one look."""

    samples: list[QueueSample]
    #: Those that did not answer, while others did.
    unreachable: list[str]

    @property
    def is_empty(self) -> bool:
        """Nothing is left to do, as far as one can know: in a queue that does not answer there may be."""
        counts = (sample.stats.states.get(state, 0) for sample in self.samples for state in _MOVING)
        return not self.unreachable and not any(counts)


@dataclass(slots=True)
class Sampler:
    """Looks at all queues; remembers where it was in each feed."""

    engine: Engine
    queues: list[str] | None
    queries: Queries | None = None
    _followers: dict[str, FeedFollower] = field(default_factory=dict)
    _looked_at: float = 0.0
    _ended: dict[str, StateCounts] = field(default_factory=dict)
    _count_at: float = 0.0

    async def sample(self) -> WatchSample:
        names = await queues_or_all(self.engine, self.queues)
        elapsed = time.monotonic() - self._looked_at
        self._looked_at = time.monotonic()

        await self._count_ended(names)

        async def sample(name: str) -> QueueSample:
            return QueueSample(await self.engine.stats(name), await self._rates(name, elapsed), self._ended.get(name))

        found, away = await self.engine.for_each_queue(names, sample)
        return WatchSample(list(found.values()), sorted(away))

    async def _count_ended(self, queues: list[str]) -> None:
        if self.queries is None or time.monotonic() < self._count_at:
            return
        began = time.monotonic()
        try:
            for queue in queues:
                self._ended[queue] = await self.queries.counts(queue=queue)
        except LedgerUnavailable:
            self._ended.clear()
        # A large ledger takes long to count: it is kept busy a tenth of the time at most.
        self._count_at = time.monotonic() + _COUNT_SHARE * (time.monotonic() - began)

    async def _rates(self, queue: str, elapsed: float) -> dict[str, float]:
        follower = self._followers.get(queue)
        if follower is None:
            self._followers[queue] = follower = FeedFollower(self.engine, queue)
            await follower.skip()
            return dict.fromkeys(_RATES, 0.0)
        seen = Counter(event.type for event in await follower.read())
        return {name: round(seen[event] / elapsed, 1) for name, event in _RATES.items()}


async def watch(
    engine: Engine,
    queries: Queries | None,
    queues: list[str] | None,
    interval_s: float,
    *,
    until_empty: bool,
    timeout_s: float | None,
    as_json: bool,
) -> ExitCode:
    """Look until interrupted (which is a good end), empty, or out of time."""
    sampler = Sampler(engine, queues, queries)
    give_up_at = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        with _WatchScreen(as_json) as screen:
            while True:
                look = await sampler.sample()
                screen.show(look)
                if until_empty and look.is_empty:
                    return ExitCode.OK
                if give_up_at is not None and time.monotonic() >= give_up_at:
                    break
                await asyncio.sleep(interval_s)
    except asyncio.CancelledError:
        return ExitCode.OK
    note(f"holdfast: not empty after {timeout_s:g} s" if until_empty else f"holdfast: {timeout_s:g} s are over")
    return ExitCode.TIMEOUT


class _WatchScreen:
    """A live table at a terminal, lines otherwise."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._console = console()
        self._live = Live(console=self._console, auto_refresh=False) if on_terminal() and not as_json else None

    def __enter__(self) -> _WatchScreen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, look: WatchSample) -> None:
        if self._as_json:
            queues = [_document(sample) for sample in look.samples]
            emit_json_line({"at": iso(now_ms()), "queues": queues, "away": look.unreachable})
        elif self._live is not None:
            self._live.update(_render(look, self._console.width), refresh=True)
        else:
            for sample in look.samples:
                print(_sample_text(sample), flush=True)
            for queue in look.unreachable:
                print(f"{instant(now_ms())} queue={queue} away", flush=True)


def _document(sample: QueueSample) -> dict[str, Any]:
    stats = sample.stats
    return {
        "queue": stats.queue,
        "states": {state.value: sample.count(state) for state in State},
        "delayed": stats.delayed,
        "workers": stats.workers,
        "paused": stats.control.paused,
        "per_second": sample.rates,
    }


def _render(look: WatchSample, width: int) -> Group:
    """A row for each queue; if that is too wide, a column for each; if that is, too, an entry for each."""
    columns = ("queue", *State, "workers", *(f"{name}/s" for name in _RATES))
    rows = [_row(sample) for sample in look.samples]
    rows += [(f"{queue} (away)", *("–" for _ in columns[1:])) for queue in look.unreachable]
    title = f"{instant(now_ms())}   Ctrl-C ends"
    (corner, *queues), *facts = zip(columns, *rows, strict=True)
    table = as_table(columns, rows, width, texts=0) or as_table((corner, *queues), facts, width, texts=0)
    return Group(title, table or as_cards(columns, rows, width))


def _row(sample: QueueSample) -> tuple[str, ...]:
    return (
        sample.stats.queue + (" (paused)" if sample.stats.control.paused else ""),
        *(_number(sample, state) for state in State),
        str(sample.stats.workers),
        *(f"{rate:,.1f}" for rate in sample.rates.values()),
    )


def _number(sample: QueueSample, state: State) -> str:
    count = sample.count(state)
    is_estimate = sample.ended is not None and state in sample.ended.estimated
    return "–" if count is None else f"{'~' if is_estimate else ''}{count:,}"


def _sample_text(sample: QueueSample) -> str:
    counts = [f"{state.value}={count}" for state in State if (count := sample.count(state)) is not None]
    rates = [f"{name}/s={rate:g}" for name, rate in sample.rates.items()]
    return " ".join((instant(now_ms()), f"queue={sample.stats.queue}", *counts, *rates))


_LOOK_S: Final = 0.2
#: More than a person can read in one look: counted instead of shown.
_READABLE: Final = 40


class LiveEventView:
    """Prints while the block runs; what happened up to its end is printed before it is left."""

    def __init__(self, engine: Engine, queues: Sequence[str]) -> None:
        self._engine = engine.clone()
        self._followers = [FeedFollower(self._engine, queue) for queue in queues]
        #: Only the first event of a job tells the task's name.
        self._names: dict[str, str] = {}
        self._showing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LiveEventView:
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
        out.print(_event_text(event, name), soft_wrap=True)


def _event_text(event: Event, name: str) -> Text:
    happened = state_text(event.to_state) if event.to_state else Text()
    happened.plain = f"{event.type:<16}"
    attempt = f"attempt {event.attempt}" if event.attempt else ""
    cells = (Text(instant(event.at_ms), "dim"), event.job_id, f"{name:<12}", happened, f"{attempt:<10}")
    return Text("  ").join(
        Text(visible(cell)) if isinstance(cell, str) else cell for cell in (*cells, shorten(event.message, 80))
    )
