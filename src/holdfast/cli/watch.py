"""The live view of `holdfast jobs watch`: counts from the engine, rates from its feed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from rich.live import Live
from rich.table import Table

from holdfast.cli.exits import ExitCode
from holdfast.cli.follow import Follower
from holdfast.cli.format import instant, iso, now_ms
from holdfast.cli.lookup import queues_or_all
from holdfast.cli.output import as_table, console, emit_json_line, note, on_terminal
from holdfast.core.states import FINAL, State, event_for
from holdfast.engine.port import Engine, QueueStats

_OPEN: Final = tuple(state for state in State if state not in FINAL)
#: States that a job leaves by itself; a queue without them is empty, whatever is parked in it.
_MOVING: Final = (State.QUEUED, State.RUNNING, State.RETRYING, State.DLQ_PENDING, State.DLQ_RECORDED)
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
    _followers: dict[str, Follower] = field(default_factory=dict)
    _looked_at: float = 0.0

    async def look(self) -> Look:
        names = await queues_or_all(self.engine, self.queues)
        elapsed = time.monotonic() - self._looked_at
        self._looked_at = time.monotonic()

        async def sample(name: str) -> Sample:
            return Sample(await self.engine.stats(name), await self._rates(name, elapsed))

        found, away = await self.engine.reach(names, sample)
        return Look(list(found.values()), sorted(away))

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
    queues: list[str] | None,
    interval_s: float,
    *,
    until_empty: bool,
    timeout_s: float | None,
    as_json: bool,
) -> ExitCode:
    """Look until interrupted (which is a good end), empty, or out of time."""
    sampler = Sampler(engine, queues)
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
        self._live = Live(console=console(), auto_refresh=False) if on_terminal() and not as_json else None

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
            self._live.update(_table(look), refresh=True)
        else:
            for sample in look.samples:
                print(_line(sample), flush=True)
            for queue in look.away:
                print(f"{instant(now_ms())} queue={queue} away", flush=True)


def _document(sample: Sample) -> dict[str, Any]:
    stats = sample.stats
    return {
        "queue": stats.queue,
        "states": {state.value: stats.states.get(state, 0) for state in _OPEN},
        "delayed": stats.delayed,
        "workers": stats.workers,
        "paused": stats.control.paused,
        "per_second": sample.rates,
    }


def _table(look: Look) -> Table:
    samples = look.samples
    shown = [state for state in _OPEN if state in _MOVING or any(sample.stats.states.get(state) for sample in samples)]
    columns = ("queue", *(state.value for state in shown), "workers", *(f"{name}/s" for name in _RATES))
    rows = [
        (
            sample.stats.queue + (" (paused)" if sample.stats.control.paused else ""),
            *(f"{sample.stats.states.get(state, 0):,}" for state in shown),
            str(sample.stats.workers),
            *(f"{rate:,.1f}" for rate in sample.rates.values()),
        )
        for sample in samples
    ]
    rows += [(f"{queue} (away)", *("–" for _ in columns[1:])) for queue in look.away]
    return as_table(columns, rows, title=f"{instant(now_ms())}   Ctrl-C ends")


def _line(sample: Sample) -> str:
    counts = [f"{state.value}={sample.stats.states.get(state, 0)}" for state in _OPEN]
    rates = [f"{name}/s={rate:g}" for name, rate in sample.rates.items()]
    return " ".join((instant(now_ms()), f"queue={sample.stats.queue}", *counts, *rates))
