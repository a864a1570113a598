"""The report of a chaos run: summary, JSON document and Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from holdfast.verification.chaos.checks import Findings
from holdfast.verification.chaos.parts import FaultResult, group_of


class ChaosReport(msgspec.Struct, kw_only=True):
    """Options, faults and findings of one run."""

    seed: int
    topology: str
    workers: int
    jobs: int
    rate: float
    #: Command that repeats the run.
    command: str
    struck: list[FaultResult] = []
    findings: Findings = msgspec.field(default_factory=Findings)
    #: Actions of the simulated operators → how often.
    operator_actions: dict[str, int] = {}
    #: Faults that cannot be injected on this machine → why.
    unsupported: dict[str, str] = {}
    load_s: float = 0.0
    #: Seconds from the repair of all faults until the last job had ended.
    ended_s: float = 0.0
    #: Seconds from then until upkeep had emptied Redis.
    tidy_s: float = 0.0
    total_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.findings.ok

    @property
    def done(self) -> list[FaultResult]:
        """The faults that were injected."""
        return [each for each in self.struck if not each.skipped]


def summary(report: ChaosReport) -> list[tuple[str, str]]:
    """Names and values of the summary table."""
    found = report.findings
    recovered = sorted(each.recovered_s for each in report.done if each.recovered_s >= 0)
    return [
        ("seed", str(report.seed)),
        ("topology", f"{report.topology}, {report.workers} workers"),
        ("jobs accepted", f"{found.accepted:,} of {report.jobs:,}"),
        ("ends", _count_phrase(found.ended)),
        ("operator actions", _count_phrase(report.operator_actions)),
        ("faults", f"{len(report.done)} done, {len(report.struck) - len(report.done)} not possible"),
        *([("seconds to recover", f"{median(recovered):.2f}, at most {recovered[-1]:.2f}")] if recovered else []),
        ("submissions in doubt", f"{found.submissions_in_doubt:,}, all submitted again"),
        ("executions", f"{found.executions:,}, {found.repeated_executions:,} after a lost lease"),
        ("ended by a job", f"{found.crashes:,} processes, by {found.poison_pills:,} poison pills"),
        ("found dead", f"{found.deaths:,} workers with leases"),
        ("effects", f"{found.effects:,}, {found.effects_in_doubt:,} of them in doubt for a while"),
        ("events", f"{found.ledger.events:,}"),
        ("restored, forked", f"{found.ledger.restores:,}, {found.ledger.forks:,}"),
        ("anomalies", f"{sum(found.anomalies.values()):,}"),
        ("seconds of load", f"{report.load_s:.0f}"),
        ("… until the last end", f"{report.ended_s:.1f}"),
        ("… until Redis was empty", f"{report.tidy_s:.1f}"),
        *([("dropped by Redis", f"{found.forgotten:,}, none of them durable")] if found.forgetful else []),
        *((f"… {fault}", f"{count:,}") for fault, count in found.forgotten_by.items()),
        ("lost", f"{found.lost:,}" if found.lost else "nothing"),
        ("defects", f"{found.defect_count:,}" if found.defect_count else "none"),
    ]


def blame(accepted_at: Sequence[float], results: Sequence[FaultResult]) -> dict[str, int]:
    """Attribute dropped jobs to faults of Redis, by the times at which the jobs were accepted.

    Before a fault: the master had not replicated them when it failed. During a fault: a server that did not remain
    master accepted them.
    """
    found: Counter[str] = Counter()
    for at in sorted(accepted_at):
        each = next((each for each in sorted(results, key=lambda each: each.ended_at) if at <= each.ended_at), None)
        if each is None:
            found["accepted after all faults"] += 1
            continue
        when = "before" if at < each.began_at else "during"
        found[f"{when} fault {each.fault.number}, {each.fault.kind} {each.fault.target}"] += 1
    return dict(found)


FAULT_COLUMNS = ("fault", "part", "times", "median s", "longest s")


def faults_table(results: Sequence[FaultResult]) -> list[tuple[str, ...]]:
    """Rows by kind and group of parts: number of faults, median and longest recovery in seconds."""
    groups: dict[tuple[str, str], list[float]] = {}
    for each in results:
        if not each.skipped:
            groups.setdefault((each.fault.kind.value, group_of(each.fault.target)), []).append(each.recovered_s)
    return [
        (kind, part, str(len(times)), _seconds(median(times)), _seconds(max(times) if min(times) >= 0 else -1.0))
        for (kind, part), times in sorted(groups.items())
    ]


def document(report: ChaosReport) -> dict[str, object]:
    """The report as JSON types."""
    plain: dict[str, object] = msgspec.to_builtins(report)
    return {"ok": report.ok, **plain}


def markdown(report: ChaosReport) -> str:
    """The report as Markdown tables."""
    lines = ["| what | |", "|---|---|", *(f"| {name} | {value} |" for name, value in summary(report)), ""]
    lines += [f"| {' | '.join(FAULT_COLUMNS)} |", "|---|---|---:|---:|---:|"]
    lines += [f"| {' | '.join(row)} |" for row in faults_table(report.struck)]
    lines += ["", *(f"- {defect}" for defect in report.findings.defects)]
    return "\n".join(lines).rstrip() + "\n"


def _count_phrase(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items())) or "none"


def _seconds(value: float) -> str:
    return "never" if value < 0 else f"{value:.2f}"
