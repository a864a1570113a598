"""What a fail-over of Redis costs: `python -m benchmarks.failover --topology sentinel --rounds 5`.

A separate deployment (Redis in that topology, PostgreSQL as ledger, two workers) under steady load. In each round a
master is lost, by kill -9 or by a planned fail-over, and its replica is promoted; then the topology is repaired. At
the end every accepted job is accounted for in the ledger. `--behind` disconnects the replica for this time before the
master is killed: on one machine replication lags by less than a millisecond, between machines by more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import select

from benchmarks.audit import migrate
from benchmarks.failover_jobs import RUNS_VARIABLE, runs
from benchmarks.failover_load import Accepted, Load
from holdfast import Holdfast
from holdfast.core.key_names import queue_prefix
from holdfast.core.states import RESTORED_EVENT
from holdfast.errors import LedgerUnavailable, Unavailable
from holdfast.ledger.verify import LedgerReport, verify_ledger
from holdfast.schema import job_events, jobs
from holdfast.verification.chaos.servers import PostgresServer
from holdfast.verification.chaos.topologies import ClusterRedis, Topology, make_topology
from tools.servers import POSTGRES, find

ROOT: Final = Path(__file__).resolve().parent.parent
JOBS: Final = ROOT / "benchmarks" / "failover_jobs.py"
QUEUE: Final = "default"
WORKERS: Final = 2
#: Submissions are under way for so long before a master is lost, and after it is back.
WARM_UP_S: Final = 1.5
TIMEOUT_S: Final = 90.0
#: Leases are short: a round is over sooner, and more jobs run again than with the default of 30 s.
SETTINGS: Final[dict[str, Any]] = {
    "visibility_timeout_s": 3.0,
    "heartbeat_interval_s": 1.0,
    "reconcile_interval_s": 5.0,
    "durable_timeout_s": 30.0,
    "connect_timeout_s": 2.0,
    "reply_timeout_s": 3.0,
}
NEVER_ALONE: Final = {"min-replicas-to-write": "1", "min-replicas-max-lag": "2"}


@dataclass(frozen=True)
class Options:
    """What is done, and how often."""

    topology: str
    rounds: int
    submitters: int
    hand_over: bool
    behind_s: float
    min_replicas: bool


@dataclass
class Round:
    """One fail-over."""

    began_at: float
    #: When the master was killed, or the planned fail-over was requested.
    lost_at: float
    ended_at: float = 0.0
    accepted_per_s: float = 0.0
    #: How long no submission was answered well; and how long it took until one that was made after that had ended.
    accepts_after_s: float = 0.0
    ends_after_s: float = 0.0
    accepted: int = 0
    #: Accepted, but neither in Redis nor in the ledger.
    lost: int = 0
    lost_durable: int = 0
    #: Lost by Redis, put back from the ledger.
    restored: int = 0
    ran_again: int = 0


class Deployment:
    """Topology, ledger, workers, and an app to submit with."""

    def __init__(self, topology: Topology, app: Holdfast, runs_file: Path) -> None:
        self.topology = topology
        self.app = app
        self.runs_file = runs_file
        self._task = app.task(name="step")(_never_called)

    async def submit(self, number: int, queue: str, durable: bool) -> str:
        options = self._task.options(idempotency_key=f"number-{number}", queue=queue, durable=durable)
        return (await options.submit(number)).id

    def owner(self) -> str:
        """The master that has the queue."""
        if isinstance(self.topology, ClusterRedis):
            return self.topology.owner(queue_prefix("", QUEUE, tagged=True) + "stream:feed")
        return self.topology.masters()[0]

    async def settled(self) -> LedgerReport:
        """The ledger's report once all that it knows has ended."""
        give_up_at = time.monotonic() + TIMEOUT_S
        while True:
            try:
                await self.app.ledger.wait_caught_up(5)
                report = await verify_ledger(self.app.ledger.queries)
                if not report.open_jobs:
                    return report
            except (Unavailable, LedgerUnavailable) as exc:
                note(f"not yet: {exc}")
            if time.monotonic() > give_up_at:
                raise SystemExit(f"jobs of the ledger are still open after {TIMEOUT_S:g} s; that is a defect")
            await asyncio.sleep(0.2)

    async def recorded_jobs(self) -> tuple[set[str], set[str]]:
        """Jobs that the ledger knows, and those of them that had to be put back."""
        async with self.app.ledger.queries.snapshot() as snapshot:
            known = {str(row.job_id) async for row in snapshot.rows(select(jobs.c.job_id))}
            query = select(job_events.c.job_id).where(job_events.c.type == RESTORED_EVENT)
            return known, {str(row.job_id) async for row in snapshot.rows(query)}


async def _never_called(number: int) -> int:
    """Workers have the real one; this process only submits."""
    raise NotImplementedError


def main(words: Sequence[str] | None = None) -> int:
    """0 if nothing durable was lost and the ledger is sound, else 1."""
    options, as_json = _parse(words)
    # Every refused submission is a line otherwise; they are counted.
    logging.disable(logging.CRITICAL)
    # Ended from outside, its servers end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rounds, report = asyncio.run(measure(options))
    if as_json:
        print(json.dumps({"options": asdict(options), "rounds": [asdict(each) for each in rounds]}, indent=2))
    else:
        _print(options, rounds, report)
    return int(not report.ok or any(each.lost_durable for each in rounds))


async def measure(options: Options) -> tuple[list[Round], LedgerReport]:
    """All rounds on one deployment, and what the ledger says in the end."""
    async with _deployed(options) as deployment:
        rounds: list[Round] = []
        async with Load(deployment.submit, submitters=options.submitters) as load:
            await load.more(50)
            for number in range(options.rounds):
                note(f"{options.topology}: round {number + 1} of {options.rounds}")
                rounds.append(await _strike(deployment, load, options))
        await asyncio.to_thread(deployment.topology.heal)
        report = await deployment.settled()
        await _account(deployment, load.accepted, rounds)
    return rounds, report


async def _strike(deployment: Deployment, load: Load, options: Options) -> Round:
    began_at, before = time.monotonic(), len(load.accepted)
    await asyncio.sleep(WARM_UP_S)
    rate = (len(load.accepted) - before) / (time.monotonic() - began_at)
    old = await asyncio.to_thread(deployment.owner)
    if options.behind_s:
        deployment.topology.node(old).disconnect_replicas()
        await asyncio.sleep(options.behind_s)
    this = Round(began_at, time.monotonic(), accepted_per_s=rate)
    await asyncio.to_thread(deployment.topology.fail_over, kill=not options.hand_over, target=old)
    if options.min_replicas:
        # A new master without a replica takes nothing: the old one has to come back.
        await asyncio.to_thread(deployment.topology.heal)
    taken_over_at = time.monotonic()
    first: Accepted = await load.until(lambda load: load.first_since(taken_over_at), "a job to be accepted")
    this.accepts_after_s = load.longest_gap(this.lost_at, first.at)
    await _ended(deployment, first)
    this.ends_after_s = time.monotonic() - this.lost_at
    await asyncio.sleep(WARM_UP_S)
    await asyncio.to_thread(deployment.topology.heal)
    this.ended_at = time.monotonic()
    return this


async def _ended(deployment: Deployment, job: Accepted) -> None:
    give_up_at = time.monotonic() + TIMEOUT_S
    while time.monotonic() < give_up_at:
        try:
            if await deployment.app.engine.wait_final(job.queue, job.job_id, 1_000):
                return
        except Unavailable:
            await asyncio.sleep(0.02)
    raise SystemExit(f"job {job.job_id} had not ended after {TIMEOUT_S:g} s; that is a defect")


async def _account(deployment: Deployment, accepted: Sequence[Accepted], rounds: Sequence[Round]) -> None:
    """The outcome of each round's jobs."""
    known, restored = await deployment.recorded_jobs()
    again = {job_id for job_id, count in Counter(runs(deployment.runs_file)).items() if count > 1}
    for this in rounds:
        own = [job for job in accepted if this.began_at <= job.at < this.ended_at]
        lost = [job for job in own if job.job_id not in known]
        this.accepted, this.lost = len(own), len(lost)
        this.lost_durable = sum(job.durable for job in lost)
        this.restored = sum(job.job_id in restored for job in own)
        this.ran_again = sum(job.job_id in again for job in own)


# The deployment --------------------------------------------------------------------------------------


@asynccontextmanager
async def _deployed(options: Options) -> AsyncIterator[Deployment]:
    binary = find(POSTGRES)
    if binary is None:
        raise SystemExit(f"no PostgreSQL here; run: {POSTGRES.how_to_install}")
    with tempfile.TemporaryDirectory(prefix="holdfast-failover-") as folder:
        scratch = Path(folder)
        async with AsyncExitStack() as stack:
            postgres = PostgresServer(binary)
            stack.callback(postgres.remove)
            postgres.start()
            await migrate(postgres.url)
            redis = {"aof": True, "options": NEVER_ALONE if options.min_replicas else {}}
            topology = make_topology(options.topology, scratch / "redis", **redis)
            stack.callback(topology.stop)
            await asyncio.to_thread(topology.start)
            runs_file, logs = scratch / "runs", [scratch / f"worker-{number}.log" for number in range(WORKERS)]
            for log in logs:
                stack.callback(_end, _worker(log, topology.url, postgres.url, runs_file))
            await _started(logs)
            app = Holdfast(topology.url, ledger=postgres.url, **SETTINGS)
            await stack.enter_async_context(app)
            yield Deployment(topology, app, runs_file)


def _worker(log: Path, url: str, ledger: str, runs_file: Path) -> subprocess.Popen[bytes]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    settings = {f"HOLDFAST_{name.upper()}": str(value) for name, value in SETTINGS.items()}
    stores = {"HOLDFAST_URL": url, "HOLDFAST_LEDGER": ledger, RUNS_VARIABLE: str(runs_file)}
    with log.open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "holdfast", "worker", f"{JOBS}:app"],
            env=kept | settings | stores | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )


async def _started(logs: Sequence[Path]) -> None:
    give_up_at = time.monotonic() + TIMEOUT_S
    while not all(" started on " in log.read_text() for log in logs):
        if time.monotonic() > give_up_at:
            raise SystemExit("a worker does not start:\n" + "\n".join(log.read_text() for log in logs))
        await asyncio.sleep(0.05)


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.terminate()
    try:
        worker.wait(10)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()


# Printing --------------------------------------------------------------------------------------------


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


_COLUMNS: Final = (
    ("accepted/s", "accepted_per_s", "{:,.0f}"),
    ("accepted", "accepted", "{:,}"),
    ("refused for s", "accepts_after_s", "{:.2f}"),
    ("ends after s", "ends_after_s", "{:.2f}"),
    ("restored", "restored", "{:,}"),
    ("lost", "lost", "{:,}"),
    ("lost durable", "lost_durable", "{:,}"),
    ("ran again", "ran_again", "{:,}"),
)


def _print(options: Options, rounds: Sequence[Round], report: LedgerReport) -> None:
    how = "hand-over" if options.hand_over else "kill -9"
    more = f", replica {options.behind_s:g} s behind" if options.behind_s else ""
    more += ", min-replicas-to-write 1" if options.min_replicas else ""
    print(f"{options.topology}, {how}{more}; every fourth job durable; {os.cpu_count()} cores\n")
    table: list[list[str]] = [["round", *(title for title, _, _ in _COLUMNS)]]
    for number, this in enumerate(rounds, 1):
        table.append([str(number), *(form.format(getattr(this, name)) for _, name, form in _COLUMNS)])
    medians = [statistics.median(getattr(this, name) for this in rounds) for _, name, _ in _COLUMNS]
    forms = [form.replace("{:,}", "{:,.0f}") for _, _, form in _COLUMNS]
    table.append(["median", *(form.format(value) for form, value in zip(forms, medians, strict=True))])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(
        f"\nledger: {report.jobs:,} jobs, all ended once: {'yes' if report.ok else 'NO'}; {report.anomalies} anomalies"
    )
    for fault in report.faults:
        print(f"  {fault}")


def _parse(words: Sequence[str] | None) -> tuple[Options, bool]:
    parser: Any = argparse.ArgumentParser(
        prog="python -m benchmarks.failover", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--topology", choices=("sentinel", "cluster"), default="sentinel")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--submitters", type=int, default=32)
    parser.add_argument("--hand-over", action="store_true", help="planned fail-over instead of kill -9")
    parser.add_argument(
        "--behind", type=float, default=0.0, metavar="S", help="disconnect the replica this long before"
    )
    parser.add_argument("--min-replicas", action="store_true", help="with min-replicas-to-write 1")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    options = Options(given.topology, given.rounds, given.submitters, given.hand_over, given.behind, given.min_replicas)
    return options, bool(given.json)


if __name__ == "__main__":
    sys.exit(main())
