"""What a worker has to do with the other processes of its host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from holdfast.engine.port import Engine
from holdfast.neighbours.isolation_locks import IsolationLocks
from holdfast.neighbours.record import ProcessRecord
from holdfast.neighbours.watch import Neighbours, identify_store
from holdfast.settings import Settings
from holdfast.upkeep.lost_leases import HasStarted, assume_started
from holdfast.worker.isolated_processes import IsolatedCommand, IsolatedProcesses


@dataclass(frozen=True)
class HostParts:
    """Each part is None where it is disabled or not possible."""

    #: What others read when this process has been killed.
    record: ProcessRecord | None
    #: The watch of the others' records.
    neighbours: Neighbours | None
    #: Processes that run suspects.
    processes: IsolatedProcesses | None

    @classmethod
    def create(
        cls,
        engine: Engine,
        settings: Settings,
        incarnation: str,
        queues: Sequence[str],
        on_dead: Callable[[], None],
        *,
        isolated_command: IsolatedCommand | None,
        isolated: bool,
    ) -> Self:
        """The parts of a worker; `isolated`: it runs suspects itself."""
        store = identify_store(settings.url, settings.namespace)
        record = None
        if not settings.in_memory:
            record = ProcessRecord.create(incarnation, store, queues, isolated=isolated)
        neighbours = Neighbours.from_settings(engine, settings, on_dead, record)
        processes = None
        if isolated_command is not None:
            processes = IsolatedProcesses(isolated_command, IsolationLocks(store), settings.drain_grace_s)
        return cls(record, neighbours, processes)

    @property
    def has_started(self) -> HasStarted:
        """What answers which jobs of a lost worker may have begun."""
        return assume_started if self.neighbours is None else self.neighbours.has_started

    def close(self) -> None:
        """Remove the record: the worker has ended in order."""
        if self.record is not None:
            self.record.close()
