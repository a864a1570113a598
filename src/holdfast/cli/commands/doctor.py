"""`holdfast doctor`: check whether the engine and the ledger are set up safely."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import typer
from rich.text import Text

from holdfast._version import __version__
from holdfast.cli.command import AsJson, ExitCode, Queues, command
from holdfast.cli.output import emit_json, emit_rows, note, number_of, span
from holdfast.cli.session import EngineTarget, queues_or_all
from holdfast.core.states import State
from holdfast.engine.port import InspectionPort
from holdfast.engine.port.reads import Finding
from holdfast.errors import LedgerUnavailable
from holdfast.factory import build_ledger
from holdfast.ledger.port.ledger import ProjectionReadPort
from holdfast.observe.redact import redact
from holdfast.settings import Settings

#: Leases use only the engine's clock, so skew is harmless to them; but `--run-at` is set by this machine's clock.
_SKEW_MS: Final = 1_000
_MAX_ENTRIES: Final = 20
#: A working projector is not behind by more than this for long.
_LAG_MS: Final = 10_000


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(
        app,
        "doctor",
        examples=(
            "holdfast doctor",
            "holdfast doctor --url redis://127.0.0.1:6379/0 --json",
            "holdfast doctor --json | jq '.findings[] | select(.ok | not)'",
        ),
    )(doctor)


async def doctor(at: EngineTarget, queue: Queues = None, as_json: AsJson = False) -> None:
    """Check persistence, eviction, version, clock, workers and the ledger, and print remedies.

    Exit code 1 if a finding endangers jobs; 0 if there are only warnings.
    """
    settings = at.settings()
    async with at.engine() as engine:
        findings = await examine(engine, queue)
        findings += await examine_ledger(settings, engine, await queues_or_all(engine, queue))
    dangers = [finding for finding in findings if not finding.ok and not finding.warning]
    if as_json:
        emit_json({"url": redact(settings.url), "ok": not dangers, "findings": [_document(one) for one in findings]})
    else:
        columns = ("check", "", "finding", "remedy")
        emit_rows(columns, [_row(one) for one in findings], empty="nothing to check", texts=2)
        note(_summary(settings.url, findings, dangers))
    if dangers:
        raise typer.Exit(ExitCode.FAILED)


async def examine(engine: InspectionPort, queues: list[str] | None) -> list[Finding]:
    """Return the findings of this command, then those of the engine, which win for the same check."""
    names = await queues_or_all(engine, queues)
    theirs = await engine.diagnose(names)
    known = {finding.check for finding in theirs}
    ours = [_version(), await _clock(engine), *await _workers(engine, names)]
    return [finding for finding in ours if finding.check not in known] + theirs


async def examine_ledger(settings: Settings, engine: InspectionPort, queues: Sequence[str]) -> list[Finding]:
    """Check whether the ledger is usable, and its lag behind each feed."""
    ledger = build_ledger(settings, engine)
    if ledger is None:
        return [Finding("ledger", True, "none: finished jobs expire, and a wipe of the engine loses all jobs")]
    try:
        findings = await ledger.diagnose()
        if ledger.projection is not None and findings[0].ok:
            lags, _ = await engine.for_each_queue(queues, partial(_lag, engine, ledger.projection))
            findings += lags.values()
        return findings
    finally:
        await ledger.close()


async def _lag(engine: InspectionPort, projection: ProjectionReadPort, queue: str) -> Finding:
    check = f"ledger of {queue}"
    end = await engine.snapshot(queue, [])
    try:
        at = await projection.position(queue)
    except LedgerUnavailable as exc:
        return Finding(check, False, str(exc), warning=True)
    if (at.position, at.nonce) == (end.position, end.nonce) or not end.position:
        return Finding(check, True, "is up to date")
    # The first entry is already in the ledger; some entries have no events.
    entries = await engine.read_feed(queue, at.position, _MAX_ENTRIES)
    unread = [entry for entry in entries if entry.position != at.position and entry.events]
    late_ms = end.at_ms - unread[0].events[0].at_ms if unread else 0
    if late_ms <= _LAG_MS:
        return Finding(check, True, f"is {span(max(late_ms, 1))} behind")
    advice = f"holdfast upkeep --queue {queue}"
    found = f"is {span(late_ms)} behind; check that a worker of this queue is running and can reach the ledger"
    return Finding(check, False, found, advice, warning=True)


def _version() -> Finding:
    return Finding("holdfast", True, f"{__version__} on Python {platform.python_version()}, {sys.platform}")


async def _clock(engine: InspectionPort) -> Finding:
    before, started = time.time_ns() // 1_000_000, time.monotonic()
    theirs = await engine.now_ms()
    trip_ms = (time.monotonic() - started) * 1000
    skew_ms = round(theirs - (before + trip_ms / 2))
    if abs(skew_ms) <= _SKEW_MS + trip_ms / 2:
        return Finding("clock", True, f"the engine's clock and this machine's agree within {span(abs(skew_ms) + 1)}")
    direction = "ahead of" if skew_ms > 0 else "behind"
    return Finding(
        "clock",
        False,
        f"the engine's clock is {span(abs(skew_ms))} {direction} this machine's",
        "synchronise both clocks (chrony, systemd-timesyncd); jobs use the engine's clock",
        warning=True,
    )


async def _workers(engine: InspectionPort, queues: Sequence[str]) -> list[Finding]:
    # The engine's own findings report unreachable queues.
    found, _ = await engine.for_each_queue(queues, partial(_worker, engine))
    return list(found.values())


async def _worker(engine: InspectionPort, queue: str) -> Finding:
    stats = await engine.stats(queue)
    ready = stats.states.get(State.QUEUED, 0) - stats.delayed + stats.states.get(State.RETRYING, 0)
    waiting = number_of(ready, "job waiting", "jobs waiting")
    if stats.control.paused:
        advice = f"holdfast queues resume {queue}"
        return Finding(f"queue {queue}", False, f"paused by an operator, {waiting}", advice, warning=True)
    if ready > 0 and stats.workers == 0:
        advice = f"holdfast worker APP --queue {queue}"
        return Finding(f"queue {queue}", False, f"{waiting}, no workers", advice, warning=True)
    message = f"{waiting}, {number_of(stats.workers, 'worker')}"
    limit, running = stats.control.concurrency, stats.states.get(State.RUNNING, 0)
    if ready > 0 and limit is not None and running >= limit:
        message += f"; at its concurrency limit, {running} of {limit} running"
        if limit == 0:
            return Finding(f"queue {queue}", False, message, f"holdfast queues concurrency {queue} N", warning=True)
    return Finding(f"queue {queue}", True, message)


def _document(finding: Finding) -> dict[str, str | bool]:
    return {
        "check": finding.check,
        "ok": finding.ok,
        "warning": finding.warning and not finding.ok,
        "message": redact(finding.message),
        "remedy": redact(finding.remedy),
    }


def _row(finding: Finding) -> tuple[str | Text, ...]:
    mark = (
        Text("ok", "green")
        if finding.ok
        else Text("warning", "yellow")
        if finding.warning
        else Text("DANGER", "bold red")
    )
    return finding.check, mark, redact(finding.message), redact(finding.remedy)


def _summary(url: str, findings: list[Finding], dangers: list[Finding]) -> str:
    warnings = sum(1 for finding in findings if not finding.ok) - len(dangers)
    found = f"{number_of(len(dangers), 'danger')}, {number_of(warnings, 'warning')}"
    verdict = found if dangers or warnings else "no problems found"
    return f"{url}: {verdict}"
