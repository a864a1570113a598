"""The report of a chaos run: for people, for programs, and as Markdown for the docs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from holdfast.verification.chaos.checks import Findings
from holdfast.verification.chaos.parts import FaultResult, group_of


class ChaosReport(msgspec.Struct, kw_only=True):
    """One run, from the seed to the verdict."""

    seed: int
    topology: str
    workers: int
    jobs: int
    rate: float
    #: Writes the same run again.
    command: str
    struck: list[FaultResult] = []
    findings: Findings = msgspec.field(default_factory=Findings)
    #: What people did: the deed → how often.
    people: dict[str, int] = {}
    #: What cannot be done on this machine, and why.
    cannot: dict[str, str] = {}
    load_s: float = 0.0
    #: From the moment that everything was healed until the last job had ended.
    ended_s: float = 0.0
    #: From then until upkeep had left nothing in Redis.
    tidy_s: float = 0.0
    total_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.findings.ok

    @property
    def done(self) -> list[FaultResult]:
        """The faults that could be done."""
        return [each for each in self.struck if not each.skipped]


def summary(report: ChaosReport) -> list[tuple[str, str]]:
    """What was done and what came of it, as names and values."""
    found = report.findings
    recovered = sorted(each.recovered_s for each in report.done if each.recovered_s >= 0)
    return [
        ("seed", str(report.seed)),
        ("topology", f"{report.topology}, {report.workers} workers"),
        ("jobs accepted", f"{found.accepted:,} of {report.jobs:,}"),
        ("ends", _counted(found.ended)),
        ("deeds of people", _counted(report.people)),
        ("faults", f"{len(report.done)} done, {len(report.struck) - len(report.done)} could not be"),
        *([("seconds to recover", f"{median(recovered):.2f}, at most {recovered[-1]:.2f}")] if recovered else []),
        ("submissions in doubt", f"{found.submissions_in_doubt:,}, all submitted again"),
        ("executions", f"{found.executions:,}, {found.repeated_executions:,} after a lost lease"),
        ("effects", f"{found.effects:,}, {found.effects_in_doubt:,} of them in doubt for a while"),
        ("events", f"{found.ledger.events:,}"),
        ("restored, forked", f"{found.ledger.restores:,}, {found.ledger.forks:,}"),
        ("anomalies", f"{sum(found.anomalies.values()):,}"),
        ("seconds of load", f"{report.load_s:.0f}"),
        ("… until the last end", f"{report.ended_s:.1f}"),
        ("… until Redis was empty", f"{report.tidy_s:.1f}"),
        *([("forgotten by Redis", f"{found.forgotten:,}, none of them durable")] if found.forgetful else []),
        *((f"… {why}", f"{count:,}") for why, count in found.forgotten_by.items()),
        ("lost", f"{found.lost:,}" if found.lost else "nothing"),
        ("defects", f"{found.defect_count:,}" if found.defect_count else "none"),
    ]


def blame(accepted_at: Sequence[float], struck: Sequence[FaultResult]) -> dict[str, int]:
    """With which fault of Redis jobs went that were accepted then, and whether before or while it went on.

    Before: the master had not passed them on when it died. While: a server took them that was not to stay the master.
    """
    found: Counter[str] = Counter()
    for at in sorted(accepted_at):
        each = next((each for each in sorted(struck, key=lambda each: each.over_at) if at <= each.over_at), None)
        if each is None:
            found["accepted after all faults"] += 1
            continue
        when = "before" if at < each.began_at else "during"
        found[f"{when} fault {each.fault.number}, {each.fault.kind} {each.fault.target}"] += 1
    return dict(found)


FAULT_COLUMNS = ("fault", "part", "times", "median s", "longest s")


def faults_table(struck: Sequence[FaultResult]) -> list[tuple[str, ...]]:
    """By kind and group of parts: how often, and the seconds until work went on."""
    groups: dict[tuple[str, str], list[float]] = {}
    for each in struck:
        if not each.skipped:
            groups.setdefault((each.fault.kind.value, group_of(each.fault.target)), []).append(each.recovered_s)
    return [
        (kind, part, str(len(times)), _seconds(median(times)), _seconds(max(times) if min(times) >= 0 else -1.0))
        for (kind, part), times in sorted(groups.items())
    ]


def document(report: ChaosReport) -> dict[str, object]:
    """For programs."""
    plain: dict[str, object] = msgspec.to_builtins(report)
    return {"ok": report.ok, **plain}


def markdown(report: ChaosReport) -> str:
    """For the docs."""
    lines = ["| what | |", "|---|---|", *(f"| {name} | {value} |" for name, value in summary(report)), ""]
    lines += [f"| {' | '.join(FAULT_COLUMNS)} |", "|---|---|---:|---:|---:|"]
    lines += [f"| {' | '.join(row)} |" for row in faults_table(report.struck)]
    lines += ["", *(f"- {defect}" for defect in report.findings.defects)]
    return "\n".join(lines).rstrip() + "\n"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items())) or "none"


def _seconds(value: float) -> str:
    return "never" if value < 0 else f"{value:.2f}"
