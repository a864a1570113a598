"""The command: deployment up, top rate measured, then a share of it for a long time; verdicts, JSON, picture, page."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from benchmarks import machine
from benchmarks.children import ProbeFailed
from benchmarks.endurance import page
from benchmarks.endurance.deployment import Deployment
from benchmarks.endurance.model import Endurance
from benchmarks.endurance.verdict import judge
from benchmarks.endurance.watch import Watch, feed_end, limit_of, position
from benchmarks.options import RESULTS

#: What should expire does so after this share of the run, so that its level is reached well before the second half.
_EXPIRE_SHARE: Final = 1 / 15
_EXPIRE_MOST_S: Final = 60.0
_EXPIRE_LEAST_S: Final = 5.0
_POLL_S: Final = 0.02
_CAUGHT_UP_WITHIN_S: Final = 120.0
#: Below this share of the rate that was asked for, the run has not shown what it was meant to.
_RATE_HELD: Final = 0.95


def main(arguments: Sequence[str]) -> int:
    """Run and report; 1 if a series grows, the rate was not reached, or a process logged an error."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options.out.mkdir(parents=True, exist_ok=True)
    began_at = datetime.now(UTC)
    scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=options.out))
    seconds = options.minutes * 60
    expire_s = min(_EXPIRE_MOST_S, max(_EXPIRE_LEAST_S, seconds * _EXPIRE_SHARE))
    try:
        with machine.held_awake(), Deployment(scratch, expire_s) as deployment:
            found = _run(deployment, options, seconds, expire_s, began_at)
    except ProbeFailed as exc:
        print(f"failed: {exc}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _write(options, began_at, found)
    return 1 if found.failures else 0


def _run(
    deployment: Deployment, options: argparse.Namespace, seconds: float, expire_s: float, began_at: datetime
) -> Endurance:
    _say(f"top rate: measuring for {options.top_seconds:g} s")
    top = top_rate(deployment, options.top_seconds)
    target = top * options.share
    _say(f"top rate {top:,.0f} jobs/s; {options.minutes:g} minutes at {target:,.0f} jobs/s")
    found = Endurance(
        began_at.isoformat(timespec="seconds"),
        {**machine.describe(), "Redis": deployment.redis.version, "PostgreSQL": deployment.postgres.description},
        minutes=options.minutes,
        top_per_s=top,
        wanted_per_s=target,
        expire_s=expire_s,
        every_s=options.every,
    )
    _watch(deployment, found, seconds)
    for name in found.series:
        found.verdicts[name] = judge(found.of(name), limit_of(name))
    found.failures += [f"{name} grows" for name, verdict in found.verdicts.items() if verdict.fails]
    if found.submitted_per_s < _RATE_HELD * target:
        found.failures.append(f"{found.submitted_per_s:,.0f} jobs/s were submitted of {target:,.0f}")
    found.failures += deployment.logged_errors()
    return found


def top_rate(deployment: Deployment, seconds: float) -> float:
    """Jobs executed and recorded in the ledger per second, while some are always ready."""
    began, before = time.monotonic(), deployment.executions()
    process = deployment.submitter(0, seconds)
    if process.wait(seconds + _CAUGHT_UP_WITHIN_S):
        raise ProbeFailed("; ".join(deployment.logged_errors()) or "the submitter failed")
    executed, end = deployment.executions() - before, feed_end(deployment)
    deadline = time.monotonic() + _CAUGHT_UP_WITHIN_S
    while _order(position(deployment)) < _order(end):
        if time.monotonic() > deadline:
            raise ProbeFailed(f"the ledger did not catch up within {_CAUGHT_UP_WITHIN_S:.0f} s")
        time.sleep(_POLL_S)
    return executed / (time.monotonic() - began)


def _watch(deployment: Deployment, found: Endurance, seconds: float) -> None:
    process = deployment.submitter(found.wanted_per_s, seconds)
    pids = {name: each.pid for name, each in deployment.processes.items()} | {"submitter": process.pid}
    watch, began = Watch(deployment, pids), time.monotonic()
    due = found.every_s
    while True:
        try:
            process.wait(max(0.0, began + due - time.monotonic()))
            break
        except subprocess.TimeoutExpired:
            if reason := deployment.died():
                raise ProbeFailed(reason) from None
        values = watch.read()
        found.add(time.monotonic() - began, values)
        _progress(due, seconds, values)
        due += found.every_s
    assert process.stdout is not None
    sent = json.loads(process.stdout.read() or b"{}")
    found.submitted = sent
    found.submitted_per_s = sum(sent.values()) / (time.monotonic() - began)


def _progress(at: float, seconds: float, values: dict[str, float]) -> None:
    _say(
        f"{at:6.0f} of {seconds:.0f} s · {values['executed, jobs/s']:,.0f} jobs/s · "
        f"Redis {values['Redis: memory, bytes'] / 1e6:,.1f} MB · lag {values['ledger: lag, s']:.2f} s"
    )


def _order(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds or 0), int(number or 0)


def _write(options: argparse.Namespace, began_at: datetime, found: Endurance) -> None:
    print(page.table(found))
    for failure in found.failures:
        print(f"failed: {failure}")
    stem = options.out / f"endurance-{began_at:%Y%m%d-%H%M%S}"
    stem.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    page.draw(stem.with_suffix(".png"), found)
    print(f"JSON  {stem.with_suffix('.json')}\nplot  {stem.with_suffix('.png')}")
    if options.page is not None:
        page.write(options.page, found)
        print(f"page  {options.page}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.endurance",
        description="Runs a separate deployment at a share of its top rate and says what grows; exit code 1 if so.",
    )
    parser.add_argument("--minutes", type=float, default=30, help="how long (default 30)")
    parser.add_argument("--share", type=float, default=0.5, help="of the top rate (default 0.5)")
    parser.add_argument("--top-seconds", type=float, default=30, help="how long the top rate is measured (default 30)")
    parser.add_argument("--every", type=float, default=5, help="seconds between two samples (default 5)")
    parser.add_argument("--page", type=Path, metavar="PATH", help="write a page here, and its picture next to it")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON, plot and scratch files")
    return parser
