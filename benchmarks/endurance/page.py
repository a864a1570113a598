"""The page for the docs, its table of verdicts, and the picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.endurance.model import Endurance
from benchmarks.endurance.submitter import DELAY_S, DELAYED, FAILING, FLAKY, KEYED
from benchmarks.endurance.verdict import TOO_SHORT

_MB: Final = "bytes"
#: Title → what the names of its series end with, and what they are divided by.
_PANELS: Final[Mapping[str, tuple[tuple[str, ...], float]]] = {
    "memory, MB": (("memory, bytes",), 1e6),
    "executed, jobs/s": (("jobs/s",), 1),
    "streams, entries": (("entries",), 1),
    "pending, and sets": (("pending", "members"), 1),
    "file handles, connections, threads, consumers": (("file handles", "connections", "threads", "consumers"), 1),
    "ledger lag, s": (("lag, s",), 1),
}


def write(path: Path, found: Endurance) -> None:
    """Write the page, and its picture next to it."""
    picture = path.with_suffix(".png")
    draw(picture, found)
    path.write_text(text(found, picture.name))


def text(found: Endurance, picture: str) -> str:
    """The page."""
    facts = found.machine
    mix = ", ".join(f"{count:,} {kind}" for kind, count in found.submitted.items())
    made = (
        "Written by `make endurance`; the command, and the rule by which a series counts as growing: "
        "[here](README.md#a-long-run)."
    )
    where = (
        f"Run of {found.began_at}: {found.minutes:g} minutes; holdfast {facts.get('holdfast', '')}, "
        f"Python {facts.get('python', '')}, {facts.get('cores', '?')} cores, Redis {facts.get('Redis', '')} "
        f"with AOF (everysec), PostgreSQL {facts.get('PostgreSQL', '')}. Two workers and one upkeep process."
    )
    what = (
        f"The top rate of this deployment, executed and in the ledger, is {found.top_per_s:,.0f} jobs/s. The run "
        f"submitted {found.submitted_per_s:,.0f} jobs/s, {found.submitted_per_s / found.top_per_s:.0%} of it: {mix}. "
        f"{FLAKY:.1%} fail once and are retried, {FAILING:.1%} become dead letters, {DELAYED:.1%} are due "
        f"{DELAY_S} s later, {KEYED:.1%} have a key and every second of these is a duplicate; three tenants. Finished "
        f"records, results and keys are kept for {found.expire_s:g} s, the ledger's rows for {2 * found.expire_s:g} s."
    )
    how = (
        "Level is the median of the second half, growth is the Theil–Sen slope over it times its length, peak is the "
        "highest value of the whole run. Series marked reported are not judged: the ledger is expected to grow until "
        "its rows expire, and PostgreSQL keeps the space of expired rows for new ones."
    )
    summary = f"**{_summary(found)}**"
    failed = [f"Failed: {failure}" for failure in found.failures]
    parts = ["# A long run, figures", made, where, what, summary, *failed]
    parts += [f"![every series over time]({picture})", table(found), how]
    return "\n\n".join(parts) + "\n"


def _summary(found: Endurance) -> str:
    grew = [name for name, verdict in found.verdicts.items() if verdict.fails]
    if grew:
        return f"Growing: {', '.join(grew)}"
    # Too few samples prove nothing.
    short = any(verdict.word == TOO_SHORT for verdict in found.verdicts.values())
    return "Too short to say what grows." if short else "Nothing grows."


def table(found: Endurance) -> str:
    """All verdicts."""
    rows = ["| series | level | growth | peak | verdict |", "| --- | ---: | ---: | ---: | --- |"]
    for name, verdict in found.verdicts.items():
        title, scale, digits = _scaled(name)
        numbers = (verdict.level, verdict.growth, verdict.peak)
        cells = [f"{number / scale:,.{digits}f}".replace("-", "−") for number in numbers]
        rows.append(f"| {title} | {' | '.join(cells)} | {verdict.word} |")
    return "\n".join(rows)


def draw(path: Path, found: Endurance) -> None:
    """Every series over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(3, 2, figsize=(11, 9), squeeze=False)
    for axes, (title, (endings, scale)) in zip(grid.flat, _PANELS.items(), strict=True):
        _panel(axes, found, title, endings, scale)
    figure.suptitle(f"holdfast {found.machine.get('holdfast', '')} · {found.began_at}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _panel(axes: Any, found: Endurance, title: str, endings: tuple[str, ...], scale: float) -> None:
    minutes = [at / 60 for at in found.at_s]
    for name, values in found.series.items():
        if name.endswith(endings) and any(values):
            axes.plot(minutes, [value / scale for value in values], linewidth=0.8, label=name.partition(",")[0])
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("minutes", fontsize=8)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=6)


def _scaled(name: str) -> tuple[str, float, int]:
    """Its title, what to divide by, and digits."""
    if name.endswith(_MB):
        return name.replace(_MB, "MB"), 1e6, 1
    return name, 1, 2 if name.endswith(" s") else 0
