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
    emit_line,
    instant,
    note,
    now_ms,
    on_terminal,
    shorten,
    state_text,
)
from holdfast.cli.session import queues_or_all
from holdfast.clock import iso
from holdfast.core.job import Event
from holdfast.core.states import FINAL, State, event_for
from holdfast.engine.port import Engine, InspectionPort
from holdfast.engine.port.feed import FeedReadPort
from holdfast.engine.port.reads import QueueStats
from holdfast.errors import EngineUnavailable, LedgerUnavailable
from holdfast.observe.visible import flatten
from holdfast.upkeep.loop import pause

if TYPE_CHECKING:
    from holdfast.ledger.queries.jobs import Queries
    from holdfast.ledger.queries.records import StateCounts


_PAGE: Final = 200
#: Limit for reading a long feed, so that the screen does not freeze for longer.
_READ_TIMEOUT_S: Final = 2.0


class FeedFollower:
    """Reads the events of one queue that are appended after `skip`."""

    def __init__(self, engine: FeedReadPort, queue: str) -> None:
        self._engine = engine
        self._queue = queue
        self._position = ""

    async def skip(self) -> None:
        """Move to the current end of the feed."""
        await self._read(keep=False)

    async def read(self) -> list[Event]:
        """Return the events appended since the last call."""
        return await self._read(keep=True)

    async def _read(self, *, keep: bool) -> list[Event]:
        events: list[Event] = []
        deadline = time.monotonic() + _READ_TIMEOUT_S
        while time.monotonic() < deadline:
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


#: States that a job leaves without an operator. A queue counts as empty if it has no job in one of them.
_MOVING: Final = (State.QUEUED, State.RUNNING, State.RETRYING, State.DLQ_PENDING, State.DLQ_RECORDED)
#: Pause between two counts of the ledger, as a multiple of the time that a count takes.
_COUNT_SHARE: Final = 9
#: Column → event type that is counted for it.
_RATES: Final = {
    "created": event_for(None, State.QUEUED),
    "succeeded": event_for(State.RUNNING, State.SUCCEEDED),
    "retried": event_for(State.RUNNING, State.RETRYING),
    "failed": event_for(State.DLQ_RECORDED, State.FAILED),
    "cancelled": event_for(State.QUEUED, State.CANCELLED),
}


@dataclass(frozen=True, slots=True)
class QueueSample:
    """One queue at one instant."""

    stats: QueueStats
    rates: dict[str, float]
    #: Jobs in final states; None without a ledger.
    ended: StateCounts | None

    def count(self, state: State) -> int | None:
        """Number of jobs in this state; None if unknown."""
        if state not in FINAL:
            return self.stats.states.get(state, 0)
        return None if self.ended is None else self.ended.states[state]


@dataclass(frozen=True, slots=True)
class WatchSample:
    """All queues at one instant."""

    samples: list[QueueSample]
    #: Queues that did not answer, while others did.
    unreachable: list[str]

    @property
    def is_empty(self) -> bool:
        """Whether no job is left to run. False while a queue is unreachable."""
        counts = (sample.stats.states.get(state, 0) for sample in self.samples for state in _MOVING)
        return not self.unreachable and not any(counts)


@dataclass(slots=True)
class Sampler:
    """Samples all queues; keeps a position in each feed."""

    engine: InspectionPort
    queues: list[str] | None
    queries: Queries | None = None
    _followers: dict[str, FeedFollower] = field(default_factory=dict)
    _sampled_at: float = 0.0
    _ended: dict[str, StateCounts] = field(default_factory=dict)
    _count_at: float = 0.0

    async def sample(self) -> WatchSample:
        names = await queues_or_all(self.engine, self.queues)
        elapsed = time.monotonic() - self._sampled_at
        self._sampled_at = time.monotonic()

        await self._count_ended(names)

        async def sample(name: str) -> QueueSample:
            return QueueSample(await self.engine.stats(name), await self._rates(name, elapsed), self._ended.get(name))

        found, unreachable = await self.engine.for_each_queue(names, sample)
        return WatchSample(list(found.values()), sorted(unreachable))

    async def _count_ended(self, queues: list[str]) -> None:
        if self.queries is None or time.monotonic() < self._count_at:
            return
        began = time.monotonic()
        try:
            for queue in queues:
                self._ended[queue] = await self.queries.counts(queue=queue)
        except LedgerUnavailable:
            self._ended.clear()
        # Counting a large ledger is slow: limit it to a tenth of the time.
        self._count_at = time.monotonic() + _COUNT_SHARE * (time.monotonic() - began)

    async def _rates(self, queue: str, elapsed: float) -> dict[str, float]:
        follower = self._followers.get(queue)
        if follower is None:
            self._followers[queue] = follower = FeedFollower(self.engine, queue)
            await follower.skip()
            return dict.fromkeys(_RATES, 0.0)
        counts = Counter(event.type for event in await follower.read())
        return {name: round(counts[event] / elapsed, 1) for name, event in _RATES.items()}


async def watch(
    engine: InspectionPort,
    queries: Queries | None,
    queues: list[str] | None,
    interval_s: float,
    *,
    until_empty: bool,
    timeout_s: float | None,
    as_json: bool,
) -> ExitCode:
    """Show samples until interrupted (exit code 0), empty or timed out."""
    sampler = Sampler(engine, queues, queries)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        with _WatchScreen(as_json) as screen:
            while True:
                watch_sample = await sampler.sample()
                screen.show(watch_sample)
                if until_empty and watch_sample.is_empty:
                    return ExitCode.OK
                if deadline is not None and time.monotonic() >= deadline:
                    break
                await asyncio.sleep(interval_s)
    except asyncio.CancelledError:
        return ExitCode.OK
    note(f"holdfast: not empty after {timeout_s:g} s" if until_empty else f"holdfast: stopped after {timeout_s:g} s")
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

    def show(self, watch_sample: WatchSample) -> None:
        if self._as_json:
            queues = [_document(sample) for sample in watch_sample.samples]
            emit_json_line({"at": iso(now_ms()), "queues": queues, "unreachable": watch_sample.unreachable})
        elif self._live is not None:
            self._live.update(_render(watch_sample, self._console.width), refresh=True)
        else:
            for sample in watch_sample.samples:
                emit_line(_sample_text(sample), flush=True)
            for queue in watch_sample.unreachable:
                emit_line(f"{instant(now_ms())} queue={queue} unreachable", flush=True)


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


def _render(watch_sample: WatchSample, width: int) -> Group:
    """Render one row per queue.

    If that is too wide, render one column per queue; if that is too wide as well, cards.
    """
    columns = ("queue", *State, "workers", *(f"{name}/s" for name in _RATES))
    rows = [_row(sample) for sample in watch_sample.samples]
    rows += [(f"{queue} (unreachable)", *("–" for _ in columns[1:])) for queue in watch_sample.unreachable]
    title = f"{instant(now_ms())}   Ctrl-C to stop"
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


_POLL_INTERVAL_S: Final = 0.2
#: More events per poll than this are counted instead of printed.
_MAX_LINES: Final = 40


class LiveEventView:
    """Prints events while the block runs; events up to its end are printed before it exits."""

    def __init__(self, engine: Engine, queues: Sequence[str]) -> None:
        self._engine = engine.clone()
        self._followers = [FeedFollower(self._engine, queue) for queue in queues]
        #: Only the first event of a job carries the task's name.
        self._names: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()

    async def __aenter__(self) -> LiveEventView:
        await self._engine.open()
        for follower in self._followers:
            for event in await follower.read():
                self._name(event)
        self._task = asyncio.create_task(self._show_loop())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            # Not cancelled: that would lose events which are read and not printed yet.
            self._ending.set()
            await self._task
        with suppress(EngineUnavailable):
            await self._show()
        await self._engine.close()

    async def _show_loop(self) -> None:
        unreachable = False
        while not self._ending.is_set():
            try:
                await self._show()
                unreachable = False
            except EngineUnavailable as exc:
                if not unreachable:
                    note(f"engine unreachable, the worker keeps retrying: {exc}")
                unreachable = True
            await pause(_POLL_INTERVAL_S, self._ending)

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
    """Print one line per event with its task's name, or counts by type if there are too many."""
    out = console()
    if len(events) > _MAX_LINES:
        counts = Counter(event.type for event, _ in events)
        last, _ = events[-1]
        out.print(instant(last.at_ms), ", ".join(f"{number:,} × {kind}" for kind, number in counts.items()))
        return
    for event, name in events:
        out.print(_event_text(event, name), soft_wrap=True)


def _event_text(event: Event, name: str) -> Text:
    label = state_text(event.to_state) if event.to_state else Text()
    label.plain = f"{flatten(event.type):<16}"
    attempt = f"attempt {event.attempt}" if event.attempt else ""
    cells = (Text(instant(event.at_ms), "dim"), event.job_id, f"{name:<12}", label, f"{attempt:<10}")
    return Text("  ").join(
        Text(flatten(cell)) if isinstance(cell, str) else cell for cell in (*cells, shorten(event.message, 80))
    )
