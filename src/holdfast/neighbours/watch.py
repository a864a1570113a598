"""Find worker processes of this host that have ended, and let their leases expire at once.

`Neighbours` reads the records of this user's processes once a second, and when one of them ends. It acts on those of
its own store whose process has certainly ended (`liveness`): the engine lets their leases expire, and `reclaim` claims
them as usual. Any number of processes may do this at once. A process that still runs keeps its leases, whatever it does
not answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final, Protocol, Self
from urllib.parse import unquote, urlsplit

from holdfast.aio import raise_if_cancelled
from holdfast.errors import EngineUnavailable
from holdfast.neighbours.directory import DirectoryRefused, default_directory, open_directory
from holdfast.neighbours.exits import ExitWatch
from holdfast.neighbours.host import read_host
from holdfast.neighbours.isolation_locks import is_isolation_lock, remove_free_lock
from holdfast.neighbours.liveness import Liveness, check_liveness
from holdfast.neighbours.record import (
    FACTS_END,
    ProcessFacts,
    ProcessRecord,
    WaitingJobs,
    parse_facts,
    parse_waiting,
    read_record,
)
from holdfast.observe.redact import redact
from holdfast.settings import Settings

_log: Final = logging.getLogger("holdfast.neighbours")

#: Seconds between two checks.
_INTERVAL_S: Final = 1.0
#: A claim on its way when the process ended may arrive later, so that one answer of 0 leases is not the last.
_QUIET_CHECKS: Final = 2
#: Seconds between two calls for a process that has no leases left. A queue may have been unreachable before.
_RECHECK_S: Final = 30.0
_TOUCH_S: Final = 60.0
#: Age of a record without leases that is removed: until then, leases that have expired may wait for a free worker.
_KEEP_S: Final = 120.0
#: Age of a record that is removed in any case, unless its process runs.
_KEEP_AT_MOST_S: Final = 86_400.0
#: Seconds between two searches for such records of other stores.
_CLEAN_S: Final = 600.0
_MAX_RECORDS: Final = 2_000
#: Names of records, and of those that were not finished; other files in the directory are not touched.
_is_record: Final = re.compile(r"\.?[0-9]+-[0-9a-f]{32}").fullmatch


class LeaseExpiry(Protocol):
    """The part of an engine that lets leases expire."""

    async def expire_leases(self, worker: str, queues: Sequence[str]) -> int: ...


def identify_store(url: str, namespace: str) -> str:
    """A short name of a store, the same for all its processes on a host. Contains no password."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        url = f"sqlite:///{Path(unquote(parts.path[1:])).resolve()}"
    return hashlib.sha256(f"{redact(url)}\0{namespace}".encode(errors="replace")).hexdigest()[:32]


class DeadNeighbour:
    """A worker of this store whose process has ended."""

    def __init__(self, facts: ProcessFacts, waiting: WaitingJobs) -> None:
        self.identity = facts.identity
        self.queues = facts.queues
        #: Whether it ran jobs that must run alone.
        self.isolated = facts.isolated
        self._waiting = waiting
        self._quiet_checks = 0
        self._next_check_at = 0.0

    def has_started(self, job_id: str) -> bool:
        """Whether code of a job that it had claimed may have run."""
        return self._waiting.has_started(job_id)

    @property
    def is_quiet(self) -> bool:
        """Whether it had no leases in the last checks."""
        return self._quiet_checks >= _QUIET_CHECKS

    def is_due(self, now: float) -> bool:
        """Whether to check its leases now."""
        return now >= self._next_check_at

    def record_count(self, count: int, now: float) -> None:
        """Record how many leases a check has let expire."""
        self._quiet_checks = 0 if count else self._quiet_checks + 1
        self._next_check_at = now + (_RECHECK_S if self.is_quiet else 0.0)


class _Entry:
    """A file of the directory, read once."""

    __slots__ = ("dead", "facts", "inode")

    def __init__(self, inode: int, facts: ProcessFacts | None) -> None:
        self.inode = inode
        self.facts = facts
        self.dead: DeadNeighbour | None = None


class Neighbours:
    """The other workers of a store on this host. Use it on one event loop."""

    def __init__(
        self,
        engine: LeaseExpiry,
        store: str,
        on_dead: Callable[[], None],
        *,
        record: ProcessRecord | None = None,
        path: Path | None = None,
    ) -> None:
        """`on_dead` is called when leases have expired, so that they are reclaimed soon. `record`: of this process."""
        self._engine = engine
        self._store = store
        self._on_dead = on_dead
        self._record = record
        self._path = path or default_directory()
        self._host = read_host()
        self._entries: dict[str, _Entry] = {}
        self._dead: dict[str, DeadNeighbour] = {}
        self._touch_at = 0.0
        self._clean_at = 0.0
        self._is_refused = False
        self._wake = asyncio.Event()
        self._exits = ExitWatch(self._wake.set)

    @classmethod
    def from_settings(
        cls, engine: LeaseExpiry, settings: Settings, on_dead: Callable[[], None], record: ProcessRecord | None = None
    ) -> Self | None:
        """A watch of the store of these settings. None if that is disabled, or other processes cannot use the store."""
        if not settings.dead_worker_detection or settings.in_memory:
            return None
        return cls(engine, identify_store(settings.url, settings.namespace), on_dead, record=record)

    @property
    def dead(self) -> Sequence[DeadNeighbour]:
        """Workers of this store that have ended, while their records exist."""
        return tuple(self._dead.values())

    def has_started(self, worker: str, job_id: str) -> bool:
        """Whether code of a job may have run in a worker. True if that is not known."""
        neighbour = self._dead.get(worker)
        return neighbour is None or neighbour.has_started(job_id)

    async def run(self) -> None:
        """Check repeatedly until cancelled."""
        try:
            while True:
                await self.run_once()
                raise_if_cancelled()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_INTERVAL_S):
                        await self._wake.wait()
        finally:
            self._exits.keep(())

    async def run_once(self) -> None:
        """Check all, and let the leases of ended workers expire. An unexpected error is logged, and not raised."""
        self._wake.clear()
        try:
            await self._run_once()
        except Exception:  # noqa: BLE001 - top of a loop
            _log.exception("checking the workers of this host failed unexpectedly, retrying")

    async def _run_once(self) -> None:
        now = time.monotonic()
        if self._record is not None and now >= self._touch_at:
            self._touch_at = now + _TOUCH_S
            self._record.touch()
        for neighbour in self.check():
            if not neighbour.is_due(now):
                continue
            try:
                await self._expire(neighbour)
            except EngineUnavailable as exc:
                _log.info("leases of worker %s, which has ended, not expired, retrying: %s", neighbour.identity, exc)

    async def _expire(self, neighbour: DeadNeighbour) -> None:
        total = 0
        while count := await self._engine.expire_leases(neighbour.identity, neighbour.queues):
            total += count
            self._on_dead()
        if total:
            _log.warning("worker %s has ended without a drain; its %d leases expire now", neighbour.identity, total)
        neighbour.record_count(total, time.monotonic())

    def check(self) -> Sequence[DeadNeighbour]:
        """Read the directory; returns the workers of this store that have ended."""
        if self._host is None:
            return ()
        try:
            directory = open_directory(self._path)
        except DirectoryRefused as exc:
            if not self._is_refused:
                self._is_refused = True
                _log.warning("workers of this host that are killed are not detected: %s", exc)
            return ()
        try:
            self._read(directory)
            self._remove_old(directory)
        finally:
            os.close(directory)
        return self.dead

    def _read(self, directory: int) -> None:
        """Update the entries: read new files, check processes of this store."""
        entries: dict[str, _Entry] = {}
        with os.scandir(directory) as files:
            for file in islice((file for file in files if _is_record(file.name)), _MAX_RECORDS):
                name, inode = file.name, file.inode()
                entry = self._entries.get(name)
                if entry is None or entry.inode != inode:
                    entry = _Entry(inode, _parse_named(name, read_record(name, directory, FACTS_END)))
                entries[name] = entry
        self._entries = entries
        for name, entry in entries.items():
            facts = entry.facts
            if facts is None or facts.store != self._store or entry.dead is not None:
                continue
            match self._check(facts):
                case Liveness.DEAD:
                    # Read now that it does not change any more.
                    entry.dead = DeadNeighbour(facts, parse_waiting(read_record(name, directory)))
                case Liveness.ALIVE if facts.pid != os.getpid():
                    self._exits.add(name, facts.pid)
        self._exits.keep(entries)
        self._dead = {entry.dead.identity: entry.dead for entry in entries.values() if entry.dead is not None}

    def _check(self, facts: ProcessFacts) -> Liveness:
        if self._record is not None and facts.file_name == self._record.file_name:
            return Liveness.ALIVE
        return check_liveness(facts.pid, facts.started_at, facts.location, self._host)

    def _remove_old(self, directory: int) -> None:
        """Remove records of ended processes that are not needed any more."""
        now = time.monotonic()
        cleans = now >= self._clean_at
        if cleans:
            self._clean_at = now + _CLEAN_S
            _remove_old_locks(directory)
        for name, entry in self._entries.items():
            if entry.dead is None and not cleans:
                continue
            keep_s = _KEEP_S if entry.dead is not None and entry.dead.is_quiet else _KEEP_AT_MOST_S
            with suppress(OSError):
                age_s = _age_s(name, directory)
                # Processes that run touch theirs. Whether one in another container runs cannot be checked.
                if age_s > keep_s and (entry.facts is None or self._check(entry.facts) is not Liveness.ALIVE):
                    os.unlink(name, dir_fd=directory)


def _remove_old_locks(directory: int) -> None:
    """Remove locks that workers which were killed have left, also those of other stores."""
    with os.scandir(directory) as files:
        names = list(islice((file.name for file in files if is_isolation_lock(file.name)), _MAX_RECORDS))
    for name in names:
        with suppress(OSError):
            if _age_s(name, directory) > _KEEP_AT_MOST_S:
                remove_free_lock(name, directory)


def _age_s(name: str, directory: int) -> float:
    return time.time() - os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime


def _parse_named(name: str, data: bytes) -> ProcessFacts | None:
    """The facts of a record, if the file has the name that belongs to them."""
    facts = parse_facts(data)
    return facts if facts is not None and facts.file_name == name else None
