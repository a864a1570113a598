"""One chaos run: deployment, load and faults, healing, the end of all jobs, checks."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from itertools import groupby
from pathlib import Path
from typing import Final

import msgspec
from sqlalchemy import func, select

from holdfast.app import Holdfast
from holdfast.core.job import DEFAULT_QUEUE
from holdfast.core.principal import ALL_TENANTS, Role
from holdfast.core.states import FINAL
from holdfast.errors import Unavailable
from holdfast.execution.backend import backend_of
from holdfast.ledger.queries.jobs import Queries
from holdfast.operations.operations import Operations
from holdfast.schema import jobs as jobs_table
from holdfast.settings import Settings
from holdfast.upkeep.feed_cursor import ORPHAN_CHECK_S
from holdfast.verification.chaos.checks import check_forgotten, check_recoveries, check_run, lagging
from holdfast.verification.chaos.deaths import deaths
from holdfast.verification.chaos.deployment import Deployment
from holdfast.verification.chaos.faults import inject, plan
from holdfast.verification.chaos.leftovers import Leftovers, feed_ends, masters
from holdfast.verification.chaos.load import LoadGenerator, ServiceClient, SubmissionJournal, configured, settings_of
from holdfast.verification.chaos.operators import OPERATOR, SimulatedOperators, resolve_effects
from holdfast.verification.chaos.parts import Fault, FaultResult
from holdfast.verification.chaos.report import ChaosReport, blame

#: How long recovery may take after a fault, and how long the run waits for the next job to end.
RECOVERY_TIMEOUT_S: Final = 30.0
TIMEOUT_S: Final = 60.0
#: Reply timeout of the final checks: reading the whole history takes longer than any query during the run may.
_CHECK_TIMEOUT_S: Final = 300
#: How long upkeep may take to empty Redis: it ends a job that a fail-over left partly ended only after two checks have
#: found it. The report has the actual time.
_TIDY_TIMEOUT_S: Final = 2 * ORPHAN_CHECK_S + 30.0
#: How long a worker may take to notice a lost lease after the last fault is healed.
_NOTICE_S: Final = 4.0
_POLL_S: Final = 0.05
#: Time for recovery and quiet after each fault, besides its duration; the load is spread over the sum.
_BETWEEN_S: Final = 2.5
_SLOWEST: Final = 20.0


class ChaosOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a run."""

    seed: int
    jobs: int = 2_000
    faults: int = 20
    topology: str = "single"
    workers: int = 3
    #: Jobs per second; 0: a rate at which the load lasts as long as the faults.
    rate: float = 0.0
    redis_binary: Path | None = None
    #: Replicas that a master needs to accept writes.
    min_replicas: int = 0
    #: Redis can come back with older data.
    rewind: bool = False

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        words = [f"holdfast chaos --seed {self.seed} --jobs {self.jobs} --faults {self.faults}"]
        words += [f"--topology {self.topology} --workers {self.workers}"]
        words += [f"--rate {self.rate:g}"] if self.rate else []
        words += [f"--min-replicas {self.min_replicas}"] if self.min_replicas else []
        words += ["--rewind"] if self.rewind else []
        words += [f"--redis-server {shlex.quote(str(self.redis_binary))}"] if self.redis_binary else []
        return " ".join(words)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a run."""

    phase: str
    jobs: int = 0
    accepted: int = 0
    ended: int = 0
    faults: int = 0
    struck: int = 0
    #: The last event.
    message: str = ""
    #: Open jobs, by task and state.
    open_jobs: str = ""


OnProgress = Callable[[Progress], None]
#: For tests: a change to the stores before they are checked.
Meddle = Callable[[Deployment, SubmissionJournal, Path], None]


async def run(
    options: ChaosOptions, folder: Path, on_progress: OnProgress = lambda _: None, meddle: Meddle | None = None
) -> ChaosReport:
    """Do one run. Leaves journal, effects file and logs in `folder`."""
    began = time.monotonic()
    on_progress(Progress(phase="starting"))
    deployment = Deployment(
        folder,
        topology=options.topology,
        workers=options.workers,
        seed=options.seed,
        redis_binary=options.redis_binary,
        min_replicas=options.min_replicas,
        rewinds=options.rewind,
    )
    async with deployment:
        one = _ChaosRun(options, folder, deployment, on_progress)
        try:
            report = await one.go(meddle)
        finally:
            await one.close()
    # After closing, to include defects of the shutdown.
    for note in deployment.notes():
        report.findings.add(note)
    return msgspec.structs.replace(report, total_s=time.monotonic() - began)


class _ChaosRun:
    """State of one run."""

    def __init__(self, options: ChaosOptions, folder: Path, deployment: Deployment, on_progress: OnProgress) -> None:
        self._options = options
        self._folder = folder
        self._deployment = deployment
        self._on_progress = on_progress
        self._journal = SubmissionJournal(folder / "journal.jsonl", options.seed)
        self._stack = AsyncExitStack()
        self._results: list[FaultResult] = []
        self._ended_s = self._tidy_s = 0.0
        #: Share of jobs that may be submitted: up to the next fault.
        self._limit = 1.0
        parts = {name: part.kinds for name, part in deployment.parts.items()}
        self._plan = plan(options.seed, options.faults, parts)

    async def close(self) -> None:
        await self._stack.aclose()
        self._journal.close()

    async def go(self, meddle: Meddle | None) -> ChaosReport:
        await self._open()
        began = time.monotonic()
        operators = asyncio.create_task(self._operators.run())
        try:
            await self._inject_faults()
            load_s = time.monotonic() - began
            self._report_progress("healing")
            await self._deployment.heal()
            self._ended_s = await self._wait_until_ended(operators)
        finally:
            operators.cancel()
            with suppress(asyncio.CancelledError):
                await operators
        tidy = await self._wait_until_tidy()
        self._report_progress("checking")
        if meddle is not None:
            await asyncio.to_thread(meddle, self._deployment, self._journal, self._folder)
            tidy = await self._leftovers.find()
        return await self._report(load_s, tidy)

    async def _open(self) -> None:
        environment, direct, seed = self._deployment.environment, self._deployment.direct, self._options.seed
        settings = Settings.load(**settings_of(direct))
        self._direct = await self._stack.enter_async_context(Holdfast(settings=settings))
        _, token = await Operations.for_app(self._direct).tokens.create(
            OPERATOR, name=OPERATOR.name, role=Role.ADMIN, tenants=[ALL_TENANTS]
        )
        app = await self._stack.enter_async_context(configured(environment))
        url = self._deployment.http_url
        caller, operator = ServiceClient(url, environment["HOLDFAST_TOKEN"]), ServiceClient(url, token)
        self._stack.push_async_callback(caller.close)
        self._stack.push_async_callback(operator.close)
        self._operators = SimulatedOperators(operator, self._journal, seed=seed, folder=self._folder)
        self._load = LoadGenerator(app, caller, self._journal, seed=seed, count=self._options.jobs, folder=self._folder)
        self._stack.push_async_callback(self._load.close)
        self._deployment.submit_crash = self._load.crash
        self._load.on_accepted = self._operators.accepted
        cluster = self._options.topology == "cluster"
        self._leftovers = Leftovers(
            lambda: masters(self._deployment), group=settings.group, feed_tail=settings.feed_tail, cluster=cluster
        )

    async def _lagging(self) -> list[str]:
        cluster = self._options.topology == "cluster"
        return await lagging(self._queries, await feed_ends(masters(self._deployment), cluster=cluster))

    # Load and faults -----------------------------------------------------------------------------------------

    async def _inject_faults(self) -> None:
        load = asyncio.create_task(self._load.run(self._rate, lambda: self._limit))
        try:
            for at, together in groupby(self._plan, key=lambda fault: fault.at):
                self._limit = at
                while self._load.accepted < int(at * self._options.jobs) and not load.done():
                    self._report_progress("injecting faults")
                    await asyncio.sleep(_POLL_S)
                self._limit = self._next_limit(at)
                results = await asyncio.gather(*(self._inject(fault) for fault in together))
                # After all of them: the time of a fault that has ended must not include one that has not.
                await asyncio.gather(*map(self._measure_recovery, results))
            self._limit = 1.0
            while not load.done():
                self._report_progress("submitting")
                await asyncio.wait({load}, timeout=_POLL_S * 10)
            await load
        finally:
            load.cancel()
            with suppress(asyncio.CancelledError):
                await load

    @property
    def _rate(self) -> float:
        if self._options.rate:
            return self._options.rate
        durations = {fault.at: 0.0 for fault in self._plan}
        for fault in self._plan:
            durations[fault.at] = max(durations[fault.at], fault.seconds + _BETWEEN_S)
        return max(_SLOWEST, self._options.jobs / max(1.0, sum(durations.values())))

    def _next_limit(self, at: float) -> float:
        return min((fault.at for fault in self._plan if fault.at > at), default=1.0)

    async def _inject(self, fault: Fault) -> FaultResult:
        accepted = self._load.accepted
        self._report_progress("injecting faults", f"{fault.kind} {fault.target}")
        began_at = time.time()
        skipped = await inject(self._deployment, fault)
        return FaultResult(fault=fault, accepted=accepted, skipped=skipped, began_at=began_at, ended_at=time.time())

    async def _measure_recovery(self, result: FaultResult) -> None:
        fault = result.fault
        if not result.skipped:
            result = msgspec.structs.replace(result, recovered_s=await self._time_recovery(fault.number))
        self._results.append(result)
        after = result.skipped or f"recovered after {result.recovered_s:.2f} s"
        self._report_progress("injecting faults", f"{fault.kind} {fault.target}: {after}")

    async def _time_recovery(self, number: int) -> float:
        """Seconds until a job submitted now has ended; -1 after the timeout."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(RECOVERY_TIMEOUT_S):
                job_id = await self._load.probe(number)
                while not await self._has_ended(job_id):  # noqa: ASYNC110 - another process ends it
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return -1.0
        return round(time.monotonic() - began, 3)

    async def _has_ended(self, job_id: str) -> bool:
        try:
            (view,) = await self._direct.engine.get(DEFAULT_QUEUE, [job_id])
        except Unavailable:
            return False
        return view is not None and view.state in FINAL

    # Afterwards ----------------------------------------------------------------------------------------------

    async def _wait_until_ended(self, operators: asyncio.Task[None]) -> float:
        """Wait until the ledger has the end of every job, or a timeout passes without a change.

        Returns the seconds until the last change.
        """
        began = time.monotonic()
        if self._plan:
            await asyncio.sleep(_NOTICE_S)
        changed_at, counts = time.monotonic(), (0, 0)
        while time.monotonic() - changed_at < TIMEOUT_S:
            if operators.done():
                await operators
            # In this order: if nothing lags, the ledger read next has everything in the feeds.
            lags = await self._lagging()
            rows, left = await self._count_left()
            ended = rows - sum(left.values())
            if not left and not lags and not self._operators.busy:
                return time.monotonic() - began
            shown = ", ".join(f"{count} {state}" for state, count in sorted(left.items()))
            self._report_progress("waiting for the last jobs", ended=ended, left=shown or "the ledger is catching up")
            with suppress(Unavailable):
                await resolve_effects(self._direct, self._journal, self._folder)
            if (rows, ended) != counts:
                changed_at, counts = time.monotonic(), (rows, ended)
            await asyncio.sleep(0.5)
        return changed_at - began

    async def _count_left(self) -> tuple[int, dict[str, int]]:
        """Number of jobs in the ledger, and the open ones by task and state."""
        table = jobs_table.c
        counted = select(table.state, table.job_type, func.count().label("count"))
        counted = counted.where(table.finished_at.is_(None)).group_by(table.state, table.job_type)
        async with self._queries.snapshot() as snapshot:
            rows = await snapshot.scalar(select(func.count()).select_from(jobs_table))
            left = {f"{row.job_type} {row.state}": int(row.count) async for row in snapshot.rows(counted)}
        return int(rows), left

    async def _wait_until_tidy(self) -> list[str]:
        """Wait for upkeep to empty Redis, without helping it. Returns what is left after the timeout."""
        self._report_progress("waiting for upkeep")
        began = time.monotonic()
        while True:
            found = await self._leftovers.find()
            self._tidy_s = time.monotonic() - began
            if not found or self._tidy_s > _TIDY_TIMEOUT_S:
                return found
            await asyncio.sleep(1)

    async def _report(self, load_s: float, leftovers: Sequence[str]) -> ChaosReport:
        forgetful = self._options.topology != "single" or self._options.rewind
        settings = settings_of(self._deployment.direct) | {"reply_timeout_s": _CHECK_TIMEOUT_S}
        async with Holdfast(settings=Settings.load(**settings)) as app:
            ledger = backend_of(app).ledger
            assert ledger is not None
            findings = await check_run(
                ledger.queries, self._journal, self._folder, self._options.jobs, forgetful=forgetful
            )
        findings.deaths = len(await asyncio.to_thread(deaths, self._folder))
        for defect in [
            *(f"the ledger lags: {lag}" for lag in await self._lagging()),
            *(f"left in Redis: {left}" for left in leftovers),
            *(f"operator request refused: {what}" for what in self._operators.refused),
            *check_recoveries(self._results, RECOVERY_TIMEOUT_S),
        ]:
            findings.add(defect)
        servers = self._deployment.topology.servers if self._deployment.topology is not None else {}
        redis_faults = [each for each in self._results if each.fault.target in servers]
        check_forgotten(findings, self._journal, redis_faults)
        accepted_at = [self._journal.accepted_at[job_id] for job_id in findings.forgotten_jobs]
        findings.forgotten_by = blame(accepted_at, redis_faults)
        return ChaosReport(
            seed=self._options.seed,
            topology=self._options.topology,
            workers=self._options.workers,
            jobs=self._options.jobs,
            rate=round(self._rate, 1),
            command=self._options.command,
            struck=sorted(self._results, key=lambda result: result.fault.number),
            findings=findings,
            operator_actions=dict(self._operators.counts),
            unsupported=self._deployment.unsupported,
            load_s=load_s,
            ended_s=self._ended_s,
            tidy_s=self._tidy_s,
        )

    @property
    def _queries(self) -> Queries:
        ledger = backend_of(self._direct).ledger
        assert ledger is not None
        return ledger.queries

    def _report_progress(self, phase: str, message: str = "", ended: int = 0, left: str = "") -> None:
        self._on_progress(
            Progress(
                phase=phase,
                jobs=self._options.jobs,
                accepted=self._load.accepted,
                ended=ended,
                faults=len(self._plan),
                struck=len(self._results),
                message=message,
                open_jobs=left,
            )
        )
