"""holdfast compared with other task systems, on the same Redis or PostgreSQL: submit, drain, latency, kill -9.

All sides have the same task and argument, one process a worker, and a store that is empty at the start. Slow ones get
fewer jobs in bulk (`Peer.share`): a rate does not need as many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.audit import Audit
from benchmarks.children import Child, ProbeFailed
from benchmarks.contest import Contestant, drain
from benchmarks.model import OURS_LEDGER, OURS_REDIS, Measure
from benchmarks.peers import venv
from benchmarks.peers.field import FIELD, ON_REDIS, Peer
from benchmarks.sides.diary import AT_ONCE, Entries, read
from benchmarks.stages.drain import WORKERS
from benchmarks.stages.latency import Latency
from benchmarks.stages.stage import Hall, Probe, Stage
from benchmarks.stores import RedisStore, Store

OURS: Final = "benchmarks.sides.ours"
_WARM_UP: Final = 50
_LEAST: Final = 200
#: The test with kill -9.
SLOW_JOBS: Final = 200
KILL_AFTER_S: Final = 0.5
WAIT_S: Final = 60.0
_BEGUN_WITHIN_S: Final = 60.0
#: Those that poll have nothing under way most of the time: the blow waits so long for an instant with ten under way,
#: and then for one with any.
_TEN_WITHIN_S: Final = 0.3
_POLL_S: Final = 0.02
_SHORT_POLL_S: Final = 0.002
#: They wait most of the time; more of them at once would disturb each other's start.
_AT_ONCE: Final = 6


class Pair(Store):
    """Redis and the ledger."""

    name = "Redis + PostgreSQL"

    def __init__(self, hall: Hall, audit: Audit) -> None:
        self._hall = hall
        self._audit = audit

    @property
    def url(self) -> str:
        return self._hall.redis.url

    def reset(self) -> None:
        self._audit.reset()

    def used_bytes(self) -> int:
        return self._hall.redis.used_bytes() + self._audit.database.used_bytes()

    def cpu_s(self) -> float:
        return self._hall.redis.cpu_s() + self._hall.postgres.cpu_s()


class Field:
    """Who takes part in this run, ours first."""

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._audit = Audit(hall, "rivals")
        self.peers: list[Peer] = []

    def prepare(self) -> None:
        """Set up PostgreSQL and the peers' environments; a failed installation does not stop the others."""
        self._audit.prepare()
        results, names = self._hall.results, self._hall.options.peers
        selected = [peer for peer in FIELD if peer.name in names]
        found = venv.ensure(peer.name for peer in selected)
        self.peers = [peer for peer in selected if venv.is_there(found[peer.name])]
        results.settings["peers"] = ", ".join(f"{peer.side} {found[peer.name]}" for peer in selected) or "none"
        results.settings["field"] = {peer.side: _words(peer, found[peer.name]) for peer in self.peers}
        for peer in selected:
            missing = f"{peer.side}: {found[peer.name]}"
            if peer not in self.peers and missing not in results.failures:
                results.failures.append(missing)

    @property
    def sides(self) -> list[tuple[Contestant, float]]:
        """Each with its share of the jobs."""
        ours = [(self._ours(OURS_REDIS), 1.0), (self._ours(OURS_LEDGER), 1.0)]
        return ours + [(self._side(peer, self._store(peer)), peer.share) for peer in self.peers]

    def fresh(self, side: Contestant) -> None:
        """An empty store, with the tables that the side needs."""
        side.store.reset()
        if side.module != OURS:
            with side.producer() as producer:
                producer.call("install")

    def crashers(self, folder: Path) -> list[Crash]:
        """All sides at defaults, and tuned against crashes where possible; each on a separate store."""
        sides = [Crash(self._hall, self._ours(name), folder, name) for name in (OURS_REDIS, OURS_LEDGER)]
        for peer in self.peers:
            for tuned in (False, True) if peer.tuned else (False,):
                name = peer.tuned_side if tuned else peer.side
                sides.append(Crash(self._hall, self._side(peer, self._store(peer)), folder, name, tuned))
        return sides

    def _ours(self, name: str) -> Contestant:
        hall = self._hall
        if name == OURS_REDIS:
            return Contestant(name, OURS, hall.redis, hall.scratch)
        settings = {"ledger": self._audit.database.url}
        return Contestant(name, OURS, Pair(hall, self._audit), hall.scratch, settings=settings)

    def _store(self, peer: Peer) -> Store:
        return self._hall.redis if peer.store == ON_REDIS else self._hall.postgres.database(f"peer_{peer.name}")

    def _side(self, peer: Peer, store: Store) -> Contestant:
        return Contestant(peer.side, peer.module, store, self._hall.scratch, python=venv.python(peer.name))


class Rivals(Stage):
    """One by one, in bulk, then drained; by two workers after another bulk."""

    name = "peers"
    title = "Compared with other task systems: submit and drain"
    measures = (
        Measure("peers.single", "submit one by one", "jobs/s", more_is_better=True),
        Measure("peers.bulk", "submit in bulk", "jobs/s", more_is_better=True),
        Measure("peers.1", "drain, 1 worker", "jobs/s", more_is_better=True),
        Measure("peers.2", "drain, 2 workers", "jobs/s", more_is_better=True),
        Measure("peers.1.cpu", "CPU of 1 worker", "µs/job", digits=1),
        Measure("peers.1.store", "CPU of the store, 1 worker", "µs/job", digits=1),
        Measure("peers.2.cpu", "CPU of 2 workers", "µs/job", digits=1),
        Measure("peers.2.store", "CPU of the store, 2 workers", "µs/job", digits=1),
        Measure("peers.rss", "worker's memory after", "MB", digits=1),
    )

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._field = Field(hall)

    def prepare(self) -> None:
        self._field.prepare()

    def probes(self) -> Sequence[Probe]:
        return [
            Probe(f"{side.name} × {workers}", partial(self._run, side, share, workers))
            for workers in WORKERS
            for side, share in self._field.sides
        ]

    def _run(self, side: Contestant, share: float, workers: int, round_number: int) -> str:
        options, add = self._hall.options, partial(self._add, side.name, round_number)
        bulk_jobs = max(_LEAST, round(options.jobs * share))
        self._field.fresh(side)
        jobs, summary = bulk_jobs, ""
        with side.producer() as producer:
            if workers == 1:
                producer.call("single", jobs=_WARM_UP)
                single = producer.call("single", jobs=options.single_jobs)["rate"]
                bulk = producer.call("bulk", jobs=bulk_jobs)["rate"]
                add("peers.single", single)
                add("peers.bulk", bulk)
                jobs += _WARM_UP + options.single_jobs
                summary = f"submit {single:,.0f} · {bulk:,.0f} /s · "
            else:
                producer.call("bulk", jobs=bulk_jobs)
        drained = drain(side, workers, jobs, self._hall.board)
        add(f"peers.{workers}", drained.rate)
        add(f"peers.{workers}.cpu", drained.worker_us)
        add(f"peers.{workers}.store", drained.store_us)
        if workers == 1:
            add("peers.rss", drained.rss / 1e6)
        return f"{summary}{drained}"

    def _add(self, side: str, round_number: int, measure: str, value: float) -> None:
        self._hall.results.add(measure, side, round_number, value)


class RivalsLatency(Latency):
    """The same as `latency`, for all sides."""

    name = "peers-latency"
    title = "Compared with other task systems: latency at low load, submit to start"

    def __init__(self, hall: Hall) -> None:
        super().__init__(hall)
        self._field = Field(hall)

    def prepare(self) -> None:
        self._field.prepare()

    def probes(self) -> Sequence[Probe]:
        return [Probe(side.name, partial(self._run, side)) for side, _ in self._field.sides]

    def _fresh(self, side: Contestant) -> None:
        self._field.fresh(side)


class Killed(Stage):
    """Slow jobs, ten at a time; the worker is killed with -9 and another one started at once."""

    name = "peers-kill"
    title = f"Killed with -9: {SLOW_JOBS} jobs of 50 ms, ten at a time, after {KILL_AFTER_S} s; one round"
    measures = (
        Measure("kill.lost", f"lost: not finished {WAIT_S:.0f} s later", "jobs"),
        Measure("kill.again", "finished before and run again", "jobs"),
        Measure("kill.under_way", "under way when it was killed", "jobs", compared=False),
        # No merit in few: a job that is lost does not begin again either.
        Measure("kill.begun", "begun twice", "jobs", compared=False),
        Measure("kill.seconds", "until all are done, if they ever are", "s", digits=1),
    )
    #: It is counting, not timing, and takes a minute each.
    once = True

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._field = Field(hall)

    def prepare(self) -> None:
        self._field.prepare()

    def probes(self) -> Sequence[Probe]:
        return [Probe(f"all sides, {_AT_ONCE} at a time", self._all)]

    def _all(self, round_number: int) -> str:
        folder = self._hall.scratch / "kill"
        folder.mkdir(exist_ok=True)
        crashes = self._field.crashers(folder)
        for crash in crashes:
            # One after the other: they share what makes a database.
            crash.prepare()
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            summaries = list(threads.map(self._guarded, crashes))
        for crash, found in zip(crashes, summaries, strict=True):
            if isinstance(found, str):
                self._hall.results.failures.append(f"{self.name}, {crash.name}: {found}")
                continue
            for measure, value in _figures(found, crash).items():
                self._hall.results.add(measure, crash.name, round_number, value)
        return "\n".join(_summary(crash, found) for crash, found in zip(crashes, summaries, strict=True))

    @staticmethod
    def _guarded(crash: Crash) -> Entries | str:
        try:
            return crash.run()
        except ProbeFailed as exc:
            return str(exc)


class Crash:
    """One side's test with kill -9."""

    def __init__(self, hall: Hall, side: Contestant, folder: Path, name: str, tuned: bool = False) -> None:
        self.name = name
        self.killed_ns = 0
        #: Begun and not ended at that instant.
        self.under_way = 0
        self._hall = hall
        self._side = side
        self._tuned = tuned
        self._log = folder / f"{name.replace(' ', '-')}.diary"
        self._folder = folder
        self._cleanup = ExitStack()

    def prepare(self) -> None:
        """A separate store."""
        slug = "".join(char if char.isalnum() else "_" for char in self.name).lower()
        store, given = self._side.store, dict(self._side.settings)
        if isinstance(store, Pair):
            audit = Audit(self._hall, f"kill_{slug}"[:60])
            audit.prepare()
            audit.database.reset()
            given["ledger"] = audit.database.url
        if isinstance(store, RedisStore | Pair):
            server = RedisStore(self._folder / slug, "no")
            self._cleanup.callback(server.close)
            own: Store = server
        else:
            database = self._hall.postgres.database(f"kill_{slug}"[:60])
            database.reset()
            own = database
        given |= {"log": str(self._log), "tuned": self._tuned}
        side = self._side
        self._side = Contestant(side.name, side.module, own, side.scratch, side.flavour, given, side.python)

    def run(self) -> Entries:
        """What was begun and ended, a minute after the kill at the latest."""
        with self._cleanup:
            with self._side.producer() as producer:
                if self._side.module != OURS:
                    producer.call("install")
                producer.call("slow", jobs=SLOW_JOBS)
            with self._worker() as first:
                _until(lambda: bool(read(self._log).began), first)
                time.sleep(KILL_AFTER_S)
                self._until_busy(first)
            self.killed_ns = time.monotonic_ns()
            self.under_way = read(self._log).under_way
            with self._worker() as second:
                deadline = self.killed_ns / 1e9 + WAIT_S
                while len((entries := read(self._log)).ended) < SLOW_JOBS and time.monotonic() < deadline:
                    if second.ended:
                        raise ProbeFailed(f"the second worker ended\n{second.log_tail}")
                    time.sleep(_POLL_S)
            return entries

    def _until_busy(self, child: Child) -> None:
        began = time.monotonic()
        while (under_way := read(self._log).under_way) < AT_ONCE:
            waited_s = time.monotonic() - began
            if under_way and waited_s > _TEN_WITHIN_S:
                return
            if waited_s > _BEGUN_WITHIN_S or child.ended:
                raise ProbeFailed(f"no job was under way\n{child.log_tail}")
            time.sleep(_SHORT_POLL_S)

    @contextmanager
    def _worker(self) -> Iterator[Child]:
        """Run a worker and kill it at the end with all its child processes."""
        with self._side.child("slow_work") as child:
            try:
                child.call("start")
                yield child
            finally:
                child.kill()


def _until(condition: Callable[[], bool], child: Child) -> None:
    deadline = time.monotonic() + _BEGUN_WITHIN_S
    while not condition():
        if time.monotonic() > deadline or child.ended:
            raise ProbeFailed(f"no job began\n{child.log_tail}")
        time.sleep(_POLL_S)


def _figures(entries: Entries, crash: Crash) -> dict[str, float]:
    lost = SLOW_JOBS - len(entries.ended)
    figures = {
        "kill.lost": float(lost),
        "kill.again": float(sum(count > 1 for count in entries.ended.values())),
        "kill.under_way": float(crash.under_way),
        "kill.begun": float(sum(count > 1 for count in entries.began.values())),
    }
    if not lost:
        figures["kill.seconds"] = (max(entries.ended_ns.values()) - crash.killed_ns) / 1e9
    return figures


def _summary(crash: Crash, found: Entries | str) -> str:
    if isinstance(found, str):
        return f"    {crash.name:34} failed: {found.splitlines()[0]}"
    figures = _figures(found, crash)
    done = f"done after {figures['kill.seconds']:.1f} s" if "kill.seconds" in figures else "not done"
    lost, again = figures["kill.lost"], figures["kill.again"]
    return f"    {crash.name:34} {crash.under_way} under way: lost {lost:.0f}, run again {again:.0f}, {done}"


def _words(peer: Peer, version: str) -> dict[str, Any]:
    return {
        "version": version,
        "store": peer.store,
        "settings": peer.settings,
        "bulk": peer.bulk,
        "slow": peer.slow,
        "tuned": peer.tuned,
    }
