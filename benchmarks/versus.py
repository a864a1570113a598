"""The page about holdfast and its peers, from runs: `python -m benchmarks.versus JSON [JSON …] --page PATH`.

All that can be computed is: tables with ratios, the targets, where a peer is ahead. Pictures are next to the page, and
so are the samples, from which this program can write the same page again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks import versus_plot
from benchmarks.markdown import about, lines
from benchmarks.model import DBOS, OURS_LEDGER, OURS_REDIS, OURS_UPKEEP, PGQUEUER, PROCRASTINATE, Measure, Results
from benchmarks.peers.field import ON_REDIS
from benchmarks.stages.audited import Audited
from benchmarks.stages.rivals import Killed, Rivals, RivalsLatency
from benchmarks.stages.stage import Stage
from benchmarks.versus_text import AFTER, BEFORE, HOW, NOTHING_AHEAD

_STAGES: Final[Sequence[type[Stage]]] = (Rivals, RivalsLatency, Audited, Killed)
_OURS: Final = (OURS_REDIS, OURS_LEDGER, OURS_UPKEEP)
_FACTS: Final = ("stages", "cores", "python", "holdfast", "Redis", "PostgreSQL", "rounds", "jobs", "cores held awake")
#: Gaps under 30 % are ties on a shared machine.
_TIE: Final = 1.3
_LEASE_S: Final = 30.0
_GRACE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Target:
    """What was to be reached, what was measured (more is better), and by how much it was met."""

    what: str
    must: float
    aim: float | None
    measured: float | None
    unit: str = "×"
    less_is_better: bool = False

    @property
    def text(self) -> str:
        if self.measured is None:
            return "not measured"
        good = self.measured <= self.must if self.less_is_better else self.measured >= self.must
        if not good:
            near = not self.less_is_better and self.must == 1 and self.measured * _TIE >= 1
            return "**not met**" + (" (a tie: within 30 %)" if near else "")
        if self.aim is not None and self.measured < self.aim:
            return f"met; the aim of {self.aim:g} × not"
        return "met" if self.aim is None else f"met, and the aim of {self.aim:g} ×"


def main(arguments: Sequence[str]) -> int:
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versus", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="JSON", help="of `make bench-peers`")
    parser.add_argument("--page", type=Path, metavar="PATH", help="write it here, pictures and samples next to it")
    given = parser.parse_args(arguments)
    runs = [msgspec.json.decode(file.read_bytes(), type=Results) for file in given.runs]
    if given.page is None:
        print(page(runs, []), end="")
        return 0
    pictures = versus_plot.draw(given.page, merged(runs))
    given.page.write_text(page(runs, pictures))
    given.page.with_suffix(".json").write_bytes(samples(runs))
    return 0


def samples(runs: Sequence[Results]) -> bytes:
    """Every figure of every round, but not each single latency."""
    return msgspec.json.encode(msgspec.structs.replace(merged(runs), latencies_ms={})) + b"\n"


def merged(runs: Sequence[Results]) -> Results:
    """One run out of several; what more than one has measured comes from the last of them."""
    whole = runs[-1]
    for run in reversed(runs[:-1]):
        known = {summary.measure for summary in whole.summaries}
        field = {**run.settings.get("field", {}), **whole.settings.get("field", {})}
        whole = msgspec.structs.replace(
            whole,
            summaries=[*whole.summaries, *(summary for summary in run.summaries if summary.measure not in known)],
            samples=[*whole.samples, *(sample for sample in run.samples if sample.measure not in known)],
            settings={**whole.settings, "field": field},
            failures=[*run.failures, *whole.failures],
        )
    return whole


def page(runs: Sequence[Results], pictures: Sequence[str]) -> str:
    """The whole page."""
    run = merged(runs)
    parts = ["# holdfast and its peers, figures", BEFORE]
    parts += [about(each, _FACTS, "in brackets the ratio to the first row of the table") for each in runs]
    if len(runs) > 1:
        parts.append("A measure that several of these runs have comes from the last of them.")
    parts += ["## Targets", _targets_table(run), "## Where a peer is ahead", *_ahead(run)]
    parts += [f"![{Path(name).stem}]({name})" for name in pictures]
    for stage in _STAGES:
        if any(run.sides(measure.key) for measure in stage.measures):
            parts += [f"## {stage.title}", _table(run, stage.measures)]
    parts += ["## Systems compared", _who(run), AFTER, HOW]
    if run.failures:
        parts += ["## Failures", "\n".join(f"- {failure.splitlines()[0]}" for failure in run.failures)]
    return "\n\n".join(parts) + "\n"


def targets(run: Results) -> list[Target]:
    """The targets, computed."""
    on_redis, all_sides = _rivals(run, ON_REDIS), _rivals(run)
    rows = [
        Target("drain, 1 worker, × the fastest peer on Redis", 6, 9, _times(run, "peers.1", OURS_REDIS, on_redis)),
        Target("drain, 1 worker, × pgqueuer", 2, 3.5, _times(run, "peers.1", OURS_REDIS, [PGQUEUER])),
        Target("drain, 2 workers, × the fastest peer", 1, None, _times(run, "peers.2", OURS_REDIS, all_sides)),
        Target("submit in bulk, × the fastest peer", 1, None, _times(run, "peers.bulk", OURS_REDIS, all_sides)),
        Target("submit one by one, × the fastest peer", 0.6, None, _times(run, "peers.single", OURS_REDIS, all_sides)),
        Target("latency p50, the best peer's ÷ ours", 1, None, _times(run, "latency.p50", OURS_REDIS, all_sides)),
        Target("latency p99, the best peer's ÷ ours", 1, None, _times(run, "latency.p99", OURS_REDIS, all_sides)),
        Target("fully audited, × pgqueuer", 1, 1.5, _times(run, "audited", OURS_LEDGER, [PGQUEUER])),
        Target("fully audited, upkeep apart, × pgqueuer", 1, 1.5, _times(run, "audited", OURS_UPKEEP, [PGQUEUER])),
        Target(
            "fully audited, submission included, × pgqueuer",
            1,
            1.5,
            _times(run, "audited.whole", OURS_LEDGER, [PGQUEUER]),
        ),
        Target("fully audited, × procrastinate", 20, None, _times(run, "audited", OURS_LEDGER, [PROCRASTINATE])),
        Target("fully audited, × DBOS", 20, None, _times(run, "audited", OURS_LEDGER, [DBOS])),
    ]
    for side in (OURS_REDIS, OURS_LEDGER):
        rows.append(
            Target(f"killed with -9, {side}: jobs lost", 0, None, _median(run, "kill.lost", side), "jobs", True)
        )
        seconds = _median(run, "kill.seconds", side)
        within = _LEASE_S + _GRACE_S
        rows.append(Target(f"killed with -9, {side}: until all are done", within, None, seconds, "s", True))
    return rows


def ahead(run: Results) -> list[str]:
    """Every measure in which some peer beats ours, on Redis alone or with the ledger."""
    found = [
        (stage.name, _ahead_of(run, measure, ours))
        for stage in _STAGES
        for measure in stage.measures
        if measure.compared
        for ours in (OURS_REDIS, OURS_LEDGER)
    ]
    return [f"- {name}: {text}" for name, text in found if text]


def _ahead_of(run: Results, measure: Measure, ours: str) -> str:
    """Those that beat this side of ours, the best first; nothing if none does."""
    value = _median(run, measure.key, ours)
    if value is None:
        return ""
    medians = {side: _median(run, measure.key, side) for side in run.sides(measure.key) if side not in _OURS}
    better = {side: theirs for side, theirs in medians.items() if theirs is not None and _beats(measure, theirs, value)}
    if not better:
        return ""
    named = ", ".join(
        f"{side} {better[side]:,.{measure.digits}f} ({_gap(measure, better[side], value)})"
        for side in sorted(better, key=better.__getitem__, reverse=measure.more_is_better)
    )
    return f"**{measure.title}**, {measure.unit}: {named} against {value:,.{measure.digits}f} of {ours}"


def _beats(measure: Measure, theirs: float, ours: float) -> bool:
    return theirs > ours if measure.more_is_better else theirs < ours


def _gap(measure: Measure, theirs: float, ours: float) -> str:
    high, low = (theirs, ours) if measure.more_is_better else (ours, theirs)
    if not low:
        return f"{high - low:g} fewer"
    return f"{high / low:.2f} ×" + (", a tie" if high / low < _TIE else "")


def _ahead(run: Results) -> list[str]:
    lines = ahead(run)
    if not lines:
        return [NOTHING_AHEAD]
    first = (
        "Every measure in which a peer's median beats that of holdfast at default settings, on Redis alone or with "
        "its ledger, and by how much. Gaps under 30 % (“a tie”) are within the variation of this machine. Recovery "
        "includes peers with settings for crashes."
    )
    return [first, "\n".join(lines)]


def _targets_table(run: Results) -> str:
    rows = [["target", "at least", "measured", ""], ["---", "---:", "---:", "---"]]
    for target in targets(run):
        sign = "at most " if target.less_is_better else ""
        measured = "–" if target.measured is None else f"{_shown(target, target.measured)} {target.unit}"
        rows.append([target.what, f"{sign}{target.must:g} {target.unit}", measured, target.text])
    return lines(rows)


def _shown(target: Target, measured: float) -> str:
    """With one more digit where two would look like the target itself."""
    if target.unit == "jobs":
        return f"{measured:,.0f}"
    return f"{measured:,.{3 if f'{measured:.2f}' == f'{target.must:.2f}' else 2}f}"


def _table(run: Results, measures: Sequence[Measure]) -> str:
    """Sides down, measures across; each figure with its ratio to our first row."""
    used = [measure for measure in measures if run.sides(measure.key)]
    sides = list(dict.fromkeys(side for measure in used for side in run.sides(measure.key)))
    heads = [f"{measure.title}, {measure.unit}" for measure in used]
    rows = [["", *heads], ["---", *["---:"] * len(heads)]]
    rows += [[side, *(_cell(run, measure, side, sides[0]) for measure in used)] for side in sides]
    return lines(rows)


def _cell(run: Results, measure: Measure, side: str, first: str) -> str:
    value, reference = _median(run, measure.key, side), _median(run, measure.key, first)
    if value is None:
        return "–"
    number = f"{value:,.{measure.digits}f}"
    return f"{number} ({value / reference:.2f} ×)" if measure.compared and reference and side != first else number


def _who(run: Results) -> str:
    field: dict[str, dict[str, Any]] = run.settings.get("field", {})
    rows = [["", "version", "on", "drain and latency", "in bulk", "killed: ten at a time", "… (tuned) as well"]]
    rows.append(["---"] * len(rows[0]))
    for side, words in field.items():
        keys = ("version", "store", "settings", "bulk", "slow", "tuned")
        rows.append([side, *(str(words[key]) or "nothing that acts within a minute" for key in keys)])
    return lines(rows)


def _rivals(run: Results, store: str = "") -> list[str]:
    """Peers of this run, by the store that they have their jobs in."""
    field: dict[str, dict[str, Any]] = run.settings.get("field", {})
    return [side for side, words in field.items() if not store or words["store"] == store]


def _times(run: Results, key: str, ours: str, rivals: Sequence[str]) -> float | None:
    """How many times as good ours is as the best of these; None if either was not measured."""
    value = _median(run, key, ours)
    theirs = [median for side in rivals if (median := _median(run, key, side)) is not None]
    if value is None or not theirs:
        return None
    return min(theirs) / value if key.startswith("latency") else value / max(theirs)


def _median(run: Results, key: str, side: str) -> float | None:
    summary = run.summary(key, side)
    return None if summary is None else summary.median


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
