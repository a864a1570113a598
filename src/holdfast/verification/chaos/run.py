"""One chaos run: a deployment up, load and faults, everything healed, every job ended, everything checked."""

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
from holdfast.ledger.queries.jobs import Queries
from holdfast.operations.operations import Operations
from holdfast.schema import jobs as jobs_table
from holdfast.settings import Settings
from holdfast.upkeep.feed_cursor import ORPHAN_CHECK_S
from holdfast.verification.chaos.checks import check_forgotten, check_recoveries, check_run, lagging
from holdfast.verification.chaos.deployment import Deployment
from holdfast.verification.chaos.faults import inject, plan
from holdfast.verification.chaos.leftovers import Leftovers, feed_ends, masters
from holdfast.verification.chaos.load import LoadGenerator, ServiceClient, SubmissionJournal, configured, settings_of
from holdfast.verification.chaos.operators import OPERATOR, SimulatedOperators, resolve_effects
from holdfast.verification.chaos.parts import Fault, FaultResult
from holdfast.verification.chaos.report import ChaosReport, blame

#: How long work may take to go on after a fault, and how long nothing at all may end before we give up.
RECOVERY_PATIENCE_S: Final = 30.0
PATIENCE_S: Final = 60.0
#: To read the whole history at the end takes longer than any question during the run may.
_CHECK_PATIENCE_S: Final = 300
#: How long upkeep may take to sweep: what a fail-over left half ended is seen to when it was found twice. How long it
#: really took is in the report.
_TIDY_PATIENCE_S: Final = 2 * ORPHAN_CHECK_S + 30.0
#: After the last fault is healed, whoever has lost a lease needs so long to notice.
_NOTICE_S: Final = 4.0
_LOOK_S: Final = 0.05
#: Beside what a fault lasts itself, so long for recovery and quiet: by this the load is spread.
_BETWEEN_S: Final = 2.5
_SLOWEST: Final = 20.0


class ChaosOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to run."""

    seed: int
    jobs: int = 2_000
    faults: int = 20
    topology: str = "single"
    workers: int = 3
    #: Jobs a second; 0: so many that the load lasts as long as the faults.
    rate: float = 0.0
    redis_binary: Path | None = None
    #: Replicas that a master needs to accept anything.
    min_replicas: int = 0

    @property
    def command(self) -> str:
        """What runs the same again."""
        words = [f"holdfast chaos --seed {self.seed} --jobs {self.jobs} --faults {self.faults}"]
        words += [f"--topology {self.topology} --workers {self.workers}"]
        words += [f"--rate {self.rate:g}"] if self.rate else []
        words += [f"--min-replicas {self.min_replicas}"] if self.min_replicas else []
        words += [f"--redis-server {shlex.quote(str(self.redis_binary))}"] if self.redis_binary else []
        return " ".join(words)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far it is."""

    phase: str
    jobs: int = 0
    accepted: int = 0
    ended: int = 0
    faults: int = 0
    struck: int = 0
    #: What happened last.
    message: str = ""
    #: Jobs that are still open.
    open_jobs: str = ""


Tell = Callable[[Progress], None]
#: For tests: what is done to the stores before they are checked.
Meddle = Callable[[Deployment, SubmissionJournal, Path], None]


async def run(
    wish: ChaosOptions, folder: Path, tell: Tell = lambda _: None, meddle: Meddle | None = None
) -> ChaosReport:
    """All of it. What is in `folder` afterwards: journal, outside world, logs."""
    began = time.monotonic()
    tell(Progress(phase="starting"))
    deployment = Deployment(
        folder,
        topology=wish.topology,
        workers=wish.workers,
        seed=wish.seed,
        redis_binary=wish.redis_binary,
        min_replicas=wish.min_replicas,
    )
    async with deployment:
        one = _ChaosRun(wish, folder, deployment, tell)
        try:
            report = await one.go(meddle)
        finally:
            await one.close()
    # Those of the end as well.
    for note in deployment.notes():
        report.findings.add(note)
    return msgspec.structs.replace(report, total_s=time.monotonic() - began)


class _ChaosRun:
    """The parts of one run that know each other."""

    def __init__(self, wish: ChaosOptions, folder: Path, deployment: Deployment, tell: Tell) -> None:
        self._wish = wish
        self._folder = folder
        self._deployment = deployment
        self._tell = tell
        self._journal = SubmissionJournal(folder / "journal.jsonl", wish.seed)
        self._stack = AsyncExitStack()
        self._struck: list[FaultResult] = []
        self._ended_s = self._tidy_s = 0.0
        #: Jobs may be begun up to here: the next fault has its turn then.
        self._limit = 1.0
        parts = {name: part.kinds for name, part in deployment.parts.items()}
        self._plan = plan(wish.seed, wish.faults, parts)

    async def close(self) -> None:
        await self._stack.aclose()
        self._journal.close()

    async def go(self, meddle: Meddle | None) -> ChaosReport:
        await self._open()
        began = time.monotonic()
        people = asyncio.create_task(self._people.run())
        try:
            await self._under_fire()
            load_s = time.monotonic() - began
            self._say("healing")
            await self._deployment.heal()
            self._ended_s = await self._until_ended(people)
        finally:
            people.cancel()
            with suppress(asyncio.CancelledError):
                await people
        tidy = await self._until_tidy()
        self._say("checking")
        if meddle is not None:
            await asyncio.to_thread(meddle, self._deployment, self._journal, self._folder)
            tidy = await self._leftovers.find()
        return await self._report(load_s, tidy)

    async def _open(self) -> None:
        environment, direct, seed = self._deployment.environment, self._deployment.direct, self._wish.seed
        settings = Settings.load(**settings_of(direct))
        self._direct = await self._stack.enter_async_context(Holdfast(settings=settings))
        _, token = await Operations.for_app(self._direct).tokens.create(
            OPERATOR, name=OPERATOR.name, role=Role.ADMIN, tenants=[ALL_TENANTS]
        )
        app = await self._stack.enter_async_context(configured(environment))
        url = self._deployment.http_url
        caller, overseer = ServiceClient(url, environment["HOLDFAST_TOKEN"]), ServiceClient(url, token)
        self._stack.push_async_callback(caller.close)
        self._stack.push_async_callback(overseer.close)
        self._people = SimulatedOperators(overseer, self._journal, seed=seed, folder=self._folder)
        self._load = LoadGenerator(app, caller, self._journal, seed=seed, count=self._wish.jobs, folder=self._folder)
        self._stack.push_async_callback(self._load.close)
        self._load.on_accepted = self._people.accepted
        cluster = self._wish.topology == "cluster"
        self._leftovers = Leftovers(
            lambda: masters(self._deployment), group=settings.group, feed_tail=settings.feed_tail, cluster=cluster
        )

    async def _lagging(self) -> list[str]:
        cluster = self._wish.topology == "cluster"
        return await lagging(self._queries, await feed_ends(masters(self._deployment), cluster=cluster))

    # Load and faults -----------------------------------------------------------------------------------------

    async def _under_fire(self) -> None:
        load = asyncio.create_task(self._load.run(self._rate, lambda: self._limit))
        try:
            for at, together in groupby(self._plan, key=lambda fault: fault.at):
                self._limit = at
                while self._load.accepted < int(at * self._wish.jobs) and not load.done():
                    self._say("under fire")
                    await asyncio.sleep(_LOOK_S)
                self._limit = self._next_limit(at)
                struck = await asyncio.gather(*(self._strike(fault) for fault in together))
                # Not before: a fault that is over must not be blamed for another one that is not.
                await asyncio.gather(*map(self._see_recovery, struck))
            self._limit = 1.0
            while not load.done():
                self._say("submitting")
                await asyncio.wait({load}, timeout=_LOOK_S * 10)
            await load
        finally:
            load.cancel()
            with suppress(asyncio.CancelledError):
                await load

    @property
    def _rate(self) -> float:
        if self._wish.rate:
            return self._wish.rate
        lasting = {fault.at: 0.0 for fault in self._plan}
        for fault in self._plan:
            lasting[fault.at] = max(lasting[fault.at], fault.seconds + _BETWEEN_S)
        return max(_SLOWEST, self._wish.jobs / max(1.0, sum(lasting.values())))

    def _next_limit(self, at: float) -> float:
        return min((fault.at for fault in self._plan if fault.at > at), default=1.0)

    async def _strike(self, fault: Fault) -> FaultResult:
        accepted = self._load.accepted
        self._say("under fire", f"{fault.kind} {fault.target}")
        began_at = time.time()
        skipped = await inject(self._deployment, fault)
        return FaultResult(fault=fault, accepted=accepted, skipped=skipped, began_at=began_at, over_at=time.time())

    async def _see_recovery(self, struck: FaultResult) -> None:
        fault = struck.fault
        if not struck.skipped:
            struck = msgspec.structs.replace(struck, recovered_s=await self._recovered(fault.number))
        self._struck.append(struck)
        after = struck.skipped or f"work went on after {struck.recovered_s:.2f} s"
        self._say("under fire", f"{fault.kind} {fault.target}: {after}")

    async def _recovered(self, number: int) -> float:
        """Seconds until a job that is submitted now has ended; -1 if it does not within the patience."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(RECOVERY_PATIENCE_S):
                job_id = await self._load.probe(number)
                while not await self._has_ended(job_id):  # noqa: ASYNC110 - another process ends it
                    await asyncio.sleep(_LOOK_S)
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

    async def _until_ended(self, people: asyncio.Task[None]) -> float:
        """Every job has its end in the ledger, or nothing has moved for too long; seconds until the last move."""
        began = time.monotonic()
        if self._plan:
            await asyncio.sleep(_NOTICE_S)
        moved, seen = time.monotonic(), (0, 0)
        while time.monotonic() - moved < PATIENCE_S:
            if people.done():
                await people
            # In this order: what is in the feeds now is in the ledger that is looked at next.
            lags = await self._lagging()
            rows, left = await self._left()
            ended = rows - sum(left.values())
            if not left and not lags and not self._people.busy:
                return time.monotonic() - began
            shown = ", ".join(f"{count} {state}" for state, count in sorted(left.items()))
            self._say("waiting for the last jobs", ended=ended, left=shown or "some on their way to the ledger")
            with suppress(Unavailable):
                await resolve_effects(self._direct, self._journal, self._folder)
            if (rows, ended) != seen:
                moved, seen = time.monotonic(), (rows, ended)
            await asyncio.sleep(0.5)
        return moved - began

    async def _left(self) -> tuple[int, dict[str, int]]:
        """How many jobs the ledger has, and those that have no end, by state and task."""
        table = jobs_table.c
        counted = select(table.state, table.job_type, func.count().label("count"))
        counted = counted.where(table.finished_at.is_(None)).group_by(table.state, table.job_type)
        async with self._queries.snapshot() as snapshot:
            rows = await snapshot.scalar(select(func.count()).select_from(jobs_table))
            left = {f"{row.job_type} {row.state}": int(row.count) async for row in snapshot.rows(counted)}
        return int(rows), left

    async def _until_tidy(self) -> list[str]:
        """What is left in Redis after upkeep had its time. It gets no help from here."""
        self._say("sweeping")
        began = time.monotonic()
        while True:
            found = await self._leftovers.find()
            self._tidy_s = time.monotonic() - began
            if not found or self._tidy_s > _TIDY_PATIENCE_S:
                return found
            await asyncio.sleep(1)

    async def _report(self, load_s: float, leftovers: Sequence[str]) -> ChaosReport:
        forgetful = self._wish.topology != "single"
        patient = settings_of(self._deployment.direct) | {"reply_timeout_s": _CHECK_PATIENCE_S}
        async with Holdfast(settings=Settings.load(**patient)) as app:
            ledger = app.ledger_backend
            assert ledger is not None
            findings = await check_run(
                ledger.queries, self._journal, self._folder, self._wish.jobs, forgetful=forgetful
            )
        for defect in [
            *(f"the ledger lags: {lag}" for lag in await self._lagging()),
            *(f"left in Redis: {left}" for left in leftovers),
            *(f"people were refused: {what}" for what in self._people.refused),
            *check_recoveries(self._struck, RECOVERY_PATIENCE_S),
        ]:
            findings.add(defect)
        servers = self._deployment.topology.servers if self._deployment.topology is not None else {}
        guilty = [each for each in self._struck if each.fault.target in servers]
        check_forgotten(findings, self._journal, guilty)
        findings.forgotten_by = blame([self._journal.accepted_at[each] for each in findings.forgotten_jobs], guilty)
        return ChaosReport(
            seed=self._wish.seed,
            topology=self._wish.topology,
            workers=self._wish.workers,
            jobs=self._wish.jobs,
            rate=round(self._rate, 1),
            command=self._wish.command,
            struck=sorted(self._struck, key=lambda struck: struck.fault.number),
            findings=findings,
            people=dict(self._people.deeds),
            cannot=self._deployment.cannot,
            load_s=load_s,
            ended_s=self._ended_s,
            tidy_s=self._tidy_s,
        )

    @property
    def _queries(self) -> Queries:
        ledger = self._direct.ledger_backend
        assert ledger is not None
        return ledger.queries

    def _say(self, phase: str, news: str = "", ended: int = 0, left: str = "") -> None:
        self._tell(
            Progress(
                phase=phase,
                jobs=self._wish.jobs,
                accepted=self._load.accepted,
                ended=ended,
                faults=len(self._plan),
                struck=len(self._struck),
                message=news,
                open_jobs=left,
            )
        )
