"""A real deployment on this machine, with a process for each part.

The parts are workers, upkeep, web servers, Redis with AOF and PostgreSQL. Every program reaches each store through its
own `Proxy`, so that one can be cut off while the others continue. (Sentinel and Cluster give clients the real
addresses: there Redis has no proxies.) A part that ends without a fault is started again, and recorded in `notes`.

After `close`, an interrupted start or a kill of this process, only the logs in its folder are left.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from math import inf
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Final, Self

from holdfast.app import Holdfast
from holdfast.core.principal import ALL_TENANTS, Principal, Role
from holdfast.ledger.migrate import migration_store, up
from holdfast.operations.operations import Operations
from holdfast.settings import Settings
from holdfast.verification.chaos.deaths import deaths
from holdfast.verification.chaos.parts import (
    DRAINED_WITHIN_S,
    SOURCE,
    Disk,
    DiskPostgres,
    FaultKind,
    Part,
    Program,
    WebProgram,
    do,
    kill_group,
    to_its_end,
)
from holdfast.verification.chaos.proxy import Proxy
from holdfast.verification.chaos.reaper import Reaper, processes_of, reap_stale
from holdfast.verification.chaos.servers import ServerProcess, find_postgres, find_redis
from holdfast.verification.chaos.topologies import SingleRedis, Topology, make_topology
from holdfast.verification.chaos.workload import crashes

APP: Final = "holdfast.verification.chaos.workload:app"
#: Short leases and timeouts, so that many faults outlast them.
SETTINGS: Final[Mapping[str, str]] = {
    "HOLDFAST_VISIBILITY_TIMEOUT_S": "3",
    "HOLDFAST_HEARTBEAT_INTERVAL_S": "1",
    "HOLDFAST_RECLAIM_INTERVAL_S": "0.5",
    "HOLDFAST_CONNECT_TIMEOUT_S": "2",
    "HOLDFAST_REPLY_TIMEOUT_S": "2",
    "HOLDFAST_RECONCILE_INTERVAL_S": "5",
    "HOLDFAST_DRAIN_GRACE_S": "3",
}
#: Redis writes to disk before it replies.
STRICT: Final = {"appendfsync": "always"}
#: Replicas report to their master once a second.
_MAX_LAG_S: Final = "2"
_POSTGRES: Final = {"max_connections": "200", "wal_level": "minimal", "max_wal_senders": "0"}

_PROCESS: Final = frozenset({FaultKind.KILL, FaultKind.STOP, FaultKind.RESTART})
_WAYS: Final = frozenset({FaultKind.CUT, FaultKind.SLOW, FaultKind.STALL})
_STORE: Final = _PROCESS | _WAYS | {FaultKind.LOSE_REPLY, FaultKind.FILL}
_WATCH_S: Final = 0.1
#: Precision of the times in logs.
_CLOCK_S: Final = 0.01
_RESTARTED_WITHIN_S: Final = 60.0


class Deployment:
    """`async with Deployment(folder) as deployment:`, then inject faults with `inject`."""

    def __init__(
        self,
        folder: Path,
        *,
        topology: str = "single",
        workers: int = 3,
        servers: int = 1,
        upkeeps: int = 1,
        seed: int = 0,
        redis_binary: Path | None = None,
        min_replicas: int = 0,
        rewinds: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """`settings` are `HOLDFAST_…` variables that override `SETTINGS`.

        A Redis master with fewer than `min_replicas` replicas accepts no writes. With `rewinds`, a single Redis can
        come back with older data. Raises `UsageError` if a server binary is missing.
        """
        self.folder = folder
        self.seed = seed
        self.settings = {**SETTINGS, **(settings or {})}
        self._counts = {"worker": workers, "upkeep": upkeeps, "server": servers}
        self._redis_binary = find_redis(redis_binary)
        self._postgres_binary = find_postgres()
        self._topology_name = topology
        self._min_replicas = min_replicas
        self._rewinds = rewinds
        self.topology: Topology | None = None
        self.parts: dict[str, Part] = {}
        #: All proxies to each store.
        self.ways: dict[str, list[Proxy]] = {"redis": [], "postgres": []}
        self.environment: dict[str, str] = {}
        self.direct: dict[str, str] = {}
        self.http_url = ""
        #: Submits the jobs of a `crash` fault by its number; returns the id of the one that ends its worker.
        self.submit_crash: Callable[[int], Awaitable[str]] | None = None
        self._notes: list[str] = []
        self._stack = AsyncExitStack()
        self._watching: asyncio.Task[None] | None = None

    # Start and close ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all parts; returns when they answer. Leaves nothing behind if it fails or is interrupted."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            await self._start_stores()
            await self._start_programs()
        except BaseException:
            await self.close()
            raise
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """End every process, unmount every disk, delete all data. Logs are kept."""
        await to_its_end(self._close())

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def heal(self) -> None:
        """End every fault: clear proxies, free disks, and resume or start processes until they answer."""
        for proxy in (way for ways in self.ways.values() for way in ways):
            proxy.clear()
        for part in self.parts.values():
            for proxy in part.proxies:
                proxy.clear()
            if part.disk is not None:
                await do(part.disk.free)
        for part in self.parts.values():
            async with part.fault_lock:
                await self.check_part(part)
                await self.restart_part(part)
        if self.topology is not None:
            await do(self.topology.heal)

    def notes(self) -> list[str]:
        """Defects of the processes: unexpected exits, failed shutdowns, tracebacks in logs."""
        found = list(self._notes)
        for part in self.parts.values():
            if isinstance(part.process, Program):
                found += part.process.defects
                found += [f"{part.name} has a traceback in its log: {line}" for line in part.process.tracebacks()]
        return found + self._find_false_deaths()

    @property
    def unsupported(self) -> dict[str, str]:
        """Faults that cannot be injected on this machine → why; for the report."""
        disks = {part.name: part.disk.why_not for part in self.parts.values() if part.disk is not None}
        return {f"{FaultKind.FILL} {name}": reason for name, reason in disks.items() if reason}

    @property
    def _redis_disk(self) -> Path:
        return self.folder.resolve() / "redis" / "disk"

    # Assembly ----------------------------------------------------------------------------------------------

    async def _start_stores(self) -> None:
        await do(reap_stale)
        postgres = DiskPostgres(self._postgres_binary, _POSTGRES, self.folder / "postgres.log")
        reaper = Reaper(self.folder, [postgres.folder, self._redis_disk])
        self._stack.push_async_callback(do, reaper.release)
        self._stack.push_async_callback(do, postgres.remove)
        self._add(Part("postgres", postgres, _STORE, postgres.disk))
        topology = self.topology = self._make_topology()
        self._stack.push_async_callback(do, topology.stop)
        if isinstance(topology, SingleRedis):
            redis = self.parts["redis"]
            assert redis.disk is not None
            self._stack.push_async_callback(do, redis.disk.unmount)
            await do(redis.disk.mount)
        # Concurrently: the slower one takes a second.
        await _all(do(postgres.start), do(topology.start))
        for part in self.parts.values():
            part.kinds = _kinds(part.kinds, part.disk)
        await self._migrate(postgres.url)
        self.direct = {**self.settings, "HOLDFAST_URL": topology.url, "HOLDFAST_LEDGER": postgres.url}
        self.direct["HOLDFAST_TOKEN"] = await self._issue_token()

    def _make_topology(self) -> Topology:
        folder, options, disk = self.folder / "redis", dict(STRICT), None
        if self._topology_name == SingleRedis.name:
            disk = Disk(self._redis_disk)
            options["dir"] = str(disk.folder)
        if self._min_replicas:
            options |= {"min-replicas-to-write": str(self._min_replicas), "min-replicas-max-lag": _MAX_LAG_S}
        made = make_topology(self._topology_name, folder, binary=self._redis_binary, aof=True, options=options)
        for name, server in made.servers.items():
            self._add(Part(name, server, self._redis_kinds if disk is not None else _PROCESS, disk))
        if made.can_fail_over:
            self.parts["redis"].kinds |= {FaultKind.FAIL_OVER, FaultKind.HAND_OVER, FaultKind.HANG}
        return made

    @property
    def _redis_kinds(self) -> frozenset[FaultKind]:
        return _STORE | {FaultKind.OUTAGES, *([FaultKind.REWIND] if self._rewinds else [])}

    async def _start_programs(self) -> None:
        self._stack.push_async_callback(self._wait_for_isolated)
        self.environment = {**self.direct, **await self._own_ways(None)}
        commands = {"worker": ["worker", APP], "upkeep": ["upkeep", APP], "server": ["serve", APP]}
        for group, count in self._counts.items():
            for number in range(1, count + 1):
                await self._add_program(f"{group}-{number}", commands[group])
        programs = [part for part in self.parts.values() if isinstance(part.process, Program)]
        await _all(*(do(part.process.start) for part in programs))

    async def _add_program(self, name: str, words: list[str]) -> None:
        proxies: list[Proxy] = []
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")}
        path = os.pathsep.join(filter(None, [str(SOURCE), kept.get("PYTHONPATH", "")]))
        variables = {**kept, **self.settings, **await self._own_ways(proxies), "PYTHONPATH": path}
        kinds = _PROCESS | _WAYS | ({FaultKind.CRASH} if words[0] == "worker" else set())
        process: Program
        if words[0] == "serve":
            process = WebProgram(name, words, self.folder, variables)
            proxies.append(await self._stack.enter_async_context(Proxy(process.port)))
            self.http_url = self.http_url or f"http://127.0.0.1:{proxies[-1].port}"
            kinds |= {FaultKind.LOSE_REPLY}
        else:
            process = Program(name, words, self.folder, variables)
        part = Part(name, process, kinds)
        part.proxies = proxies
        self._add(part)
        self._stack.push_async_callback(self._end, part)

    async def _own_ways(self, proxies: list[Proxy] | None) -> dict[str, str]:
        """Return the stores' URLs through new proxies, which are added to `proxies`."""
        assert self.topology is not None
        found = {"HOLDFAST_URL": self.topology.url}
        if isinstance(self.topology, SingleRedis):
            way = await self._way("redis", proxies)
            found["HOLDFAST_URL"] = way.url
        way = await self._way("postgres", proxies)
        found["HOLDFAST_LEDGER"] = f"postgresql://postgres@127.0.0.1:{way.port}/postgres"
        return found

    async def _way(self, store: str, proxies: list[Proxy] | None) -> Proxy:
        way = await self._stack.enter_async_context(Proxy(self.parts[store].process.port))
        self.ways[store].append(way)
        self.parts[store].proxies.append(way)
        if proxies is not None:
            proxies.append(way)
        return way

    def _add(self, part: Part) -> None:
        self.parts[part.name] = part

    async def _migrate(self, url: str) -> None:
        store = migration_store(url)
        try:
            await up(store)
        finally:
            await store.close()

    async def _issue_token(self) -> str:
        """Issue a token of an admin of all tenants, for the load generator."""
        maker = Principal(name="local:chaos", role=Role.ADMIN, tenants=frozenset({ALL_TENANTS}), verified=False)
        values = {key.removeprefix("HOLDFAST_").lower(): value for key, value in self.direct.items()}
        async with Holdfast(settings=Settings.load(**values)) as app:
            _, text = await Operations.for_app(app).tokens.create(
                maker, name="chaos", role=Role.ADMIN, tenants=[ALL_TENANTS]
            )
        return text

    def _find_false_deaths(self) -> list[str]:
        """Processes whose leases others have let expire although they had not ended."""
        ends_at = {crash.pid: crash.at for crash in crashes(self.folder)}
        for part in self.parts.values():
            if isinstance(part.process, Program):
                ends_at = {**part.process.ends_at, **ends_at}
        return [
            f"process {death.pid} was found dead while it ran, and {death.leases} leases were taken from it"
            for death in deaths(self.folder)
            if death.at < ends_at.get(death.pid, -inf) - _CLOCK_S
        ]

    # Supervision -------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            for part in self.parts.values():
                if not part.fault_lock.locked() and part.process.ended is not None:
                    async with part.fault_lock:
                        await self.check_part(part)

    async def check_part(self, part: Part) -> None:
        """Record an unexpected exit of the part and start it again.

        The caller holds `fault_lock` and calls this before it injects a fault, which would hide the exit.
        """
        if part.process.ended is not None:
            self._note_exit(part)
            await self.restart_part(part)

    def _note_exit(self, part: Part) -> None:
        code = part.process.ended
        if code is not None and not self._is_crash(part):
            self._notes.append(f"{part.name} ended unexpectedly with {_exit(code)}")

    async def restart_part(self, part: Part) -> None:
        """Start or resume a part and wait until it answers.

        Failed starts are recorded and retried; after a timeout the error is raised. A program may exit because a store
        is failing: that start is repeated, but not recorded.
        """
        deadline = monotonic() + _RESTARTED_WITHIN_S
        while True:
            began = monotonic()
            try:
                await do(part.revive)
                return
            except (RuntimeError, TimeoutError) as exc:
                expected = self._was_store_hurt(began) or self._is_crash(part)
                if not (isinstance(part.process, Program) and expected):
                    self._notes.append(f"{part.name} did not start: {exc}")
                if monotonic() > deadline:
                    raise
            await asyncio.sleep(_WATCH_S)

    def _is_crash(self, part: Part) -> bool:
        """Whether a job has ended the current or last process of this part, as intended."""
        return part.process.started and any(crash.pid == part.process.pid for crash in crashes(self.folder))

    def _was_store_hurt(self, since: float) -> bool:
        stores = [part for part in self.parts.values() if not isinstance(part.process, Program)]
        return any(part.fault_lock.locked() or part.hurt_until >= since for part in stores)

    async def _end(self, part: Part) -> None:
        self._note_exit(part)
        leader = _pid(part.process)
        await do(part.end)
        if leader is not None and kill_group(leader):
            self._notes.append(f"{part.name} left processes behind when it ended")

    async def _wait_for_isolated(self) -> None:
        """Wait for the processes that workers started for lost jobs; they end after a killed worker, by a drain."""
        deadline = monotonic() + DRAINED_WITHIN_S
        while left := await do(self._isolated):
            if monotonic() > deadline:
                self._notes.append(f"processes {left} for lost jobs ran {DRAINED_WITHIN_S:g} s after their workers")
                for pid in left:
                    kill_group(pid)
                return
            await asyncio.sleep(_WATCH_S)

    def _isolated(self) -> list[int]:
        return [pid for pid in processes_of(str(self.folder.resolve())) if b"--isolated" in _words_of(pid)]

    async def _close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for part in self.parts.values():
            for proxy in part.proxies:
                proxy.clear()
        try:
            await self._stack.aclose()
        finally:
            await do(self._delete_data)

    def _delete_data(self) -> None:
        for part in self.parts.values():
            if part.disk is not None:
                shutil.rmtree(part.disk.folder, ignore_errors=True)


def _kinds(kinds: frozenset[FaultKind], disk: Disk | None) -> frozenset[FaultKind]:
    """The possible kinds: a disk that could not be mounted cannot be filled."""
    return kinds if disk is not None and not disk.why_not else kinds - {FaultKind.FILL}


def _pid(process: ServerProcess) -> int | None:
    return process.pid if process.started else None


def _words_of(pid: int) -> list[bytes]:
    """The command line of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


async def _all(*work: object) -> None:
    """Await all to their ends, then raise the first error, if any."""
    done = await asyncio.gather(*work, return_exceptions=True)  # type: ignore[call-overload]
    for outcome in done:
        if isinstance(outcome, BaseException):
            raise outcome
