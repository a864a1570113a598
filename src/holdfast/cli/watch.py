"""The live view of `holdfast jobs watch`: open jobs from the engine, ended ones from the ledger, rates from a feed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.live import Live

from holdfast.cli.exits import ExitCode
from holdfast.cli.follow import Follower
from holdfast.cli.format import instant, iso, now_ms
from holdfast.cli.lookup import queues_or_all
from holdfast.cli.output import as_cards, as_table, console, emit_json_line, note, on_terminal
from holdfast.core.states import FINAL, State, event_for
from holdfast.engine.port import Engine, QueueStats
from holdfast.errors import LedgerUnavailable

if TYPE_CHECKING:
    # SQLAlchemy, which a look at Redis alone does not need.
    from holdfast.ledger.queries import Queries
    from holdfast.ledger.records import Counts

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
class Sample:
    """One queue at one look."""

    stats: QueueStats
    rates: dict[str, float]
    #: Jobs that have ended; None where no ledger counts them.
    ended: Counts | None

    def count(self, state: State) -> int | None:
        """Jobs in this state; None if that is not known."""
        if state not in FINAL:
            return self.stats.states.get(state, 0)
        return None if self.ended is None else self.ended.states[state]


@dataclass(frozen=True, slots=True)
class Look:
    """All queues at one look."""

    samples: list[Sample]
    #: Those that did not answer, while others did.
    away: list[str]

    @property
    def is_empty(self) -> bool:
        """Nothing is left to do, as far as one can know: in a queue that does not answer there may be."""
        counts = (sample.stats.states.get(state, 0) for sample in self.samples for state in _MOVING)
        return not self.away and not any(counts)


@dataclass(slots=True)
class Sampler:
    """Looks at all queues; remembers where it was in each feed."""

    engine: Engine
    queues: list[str] | None
    queries: Queries | None = None
    _followers: dict[str, Follower] = field(default_factory=dict)
    _looked_at: float = 0.0
    _ended: dict[str, Counts] = field(default_factory=dict)
    _count_at: float = 0.0

    async def look(self) -> Look:
        names = await queues_or_all(self.engine, self.queues)
        elapsed = time.monotonic() - self._looked_at
        self._looked_at = time.monotonic()

        await self._count_ended(names)

        async def sample(name: str) -> Sample:
            return Sample(await self.engine.stats(name), await self._rates(name, elapsed), self._ended.get(name))

        found, away = await self.engine.reach(names, sample)
        return Look(list(found.values()), sorted(away))

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
            self._followers[queue] = follower = Follower(self.engine, queue)
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
        with _Screen(as_json) as screen:
            while True:
                look = await sampler.look()
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


class _Screen:
    """A live table at a terminal, lines otherwise."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._console = console()
        self._live = Live(console=self._console, auto_refresh=False) if on_terminal() and not as_json else None

    def __enter__(self) -> _Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, look: Look) -> None:
        if self._as_json:
            queues = [_document(sample) for sample in look.samples]
            emit_json_line({"at": iso(now_ms()), "queues": queues, "away": look.away})
        elif self._live is not None:
            self._live.update(_render(look, self._console.width), refresh=True)
        else:
            for sample in look.samples:
                print(_line(sample), flush=True)
            for queue in look.away:
                print(f"{instant(now_ms())} queue={queue} away", flush=True)


def _document(sample: Sample) -> dict[str, Any]:
    stats = sample.stats
    return {
        "queue": stats.queue,
        "states": {state.value: sample.count(state) for state in State},
        "delayed": stats.delayed,
        "workers": stats.workers,
        "paused": stats.control.paused,
        "per_second": sample.rates,
    }


def _render(look: Look, width: int) -> Group:
    """A row for each queue; if that is too wide, a column for each; if that is, too, an entry for each."""
    columns = ("queue", *State, "workers", *(f"{name}/s" for name in _RATES))
    rows = [_row(sample) for sample in look.samples]
    rows += [(f"{queue} (away)", *("–" for _ in columns[1:])) for queue in look.away]
    title = f"{instant(now_ms())}   Ctrl-C ends"
    (corner, *queues), *facts = zip(columns, *rows, strict=True)
    table = as_table(columns, rows, width, texts=0) or as_table((corner, *queues), facts, width, texts=0)
    return Group(title, table or as_cards(columns, rows, width))


def _row(sample: Sample) -> tuple[str, ...]:
    return (
        sample.stats.queue + (" (paused)" if sample.stats.control.paused else ""),
        *(_number(sample, state) for state in State),
        str(sample.stats.workers),
        *(f"{rate:,.1f}" for rate in sample.rates.values()),
    )


def _number(sample: Sample, state: State) -> str:
    count = sample.count(state)
    is_estimate = sample.ended is not None and state in sample.ended.estimated
    return "–" if count is None else f"{'~' if is_estimate else ''}{count:,}"


def _line(sample: Sample) -> str:
    counts = [f"{state.value}={count}" for state in State if (count := sample.count(state)) is not None]
    rates = [f"{name}/s={rate:g}" for name, rate in sample.rates.items()]
    return " ".join((instant(now_ms()), f"queue={sample.stats.queue}", *counts, *rates))
