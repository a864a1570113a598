"""Tasks that workers have announced, for operators and programs without the app.

Readable by every role: names and arguments of tasks belong to no tenant. Nothing about jobs or workers is shown.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.core.announcement import CURRENT_MS, AnnouncedTask, merge
from holdfast.core.principal import Permission, Principal
from holdfast.engine.port.reads import ReadPort
from holdfast.errors import LedgerUnavailable, TaskNotAnnounced

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger

_log: Final = logging.getLogger("holdfast.operations")


class TaskInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A task with its schemas, the latest first. Queue and priority are those of the latest."""

    task: str
    schemas: tuple[AnnouncedTask, ...]

    @property
    def latest(self) -> AnnouncedTask:
        return self.schemas[0]

    @property
    def current(self) -> int:
        """Number of schemas that workers have now; more than one during a deployment."""
        return sum(each.seen_at_ms >= self.latest.seen_at_ms - CURRENT_MS for each in self.schemas)

    @property
    def arguments(self) -> list[str] | None:
        """Names of the arguments, optional ones in brackets; None if there is no schema."""
        document = self.latest.document
        if document is None:
            return None
        properties, required = document.get("properties"), document.get("required")
        names = list(properties) if isinstance(properties, dict) else []
        needed = required if isinstance(required, list) else []
        return [name if name in needed else f"[{name}]" for name in names]


class TaskOperations:
    """Reads announcements; works without a ledger."""

    def __init__(self, engine: ReadPort, ledger: Ledger | None) -> None:
        self._engine = engine
        self._ledger = ledger

    async def list(self, principal: Principal, queues: Sequence[str] = ()) -> list[TaskInfo]:
        """List tasks by name, of these queues if any are given."""
        principal.require(Permission.READ)
        found: dict[str, list[AnnouncedTask]] = {}
        for each in merge(await self._engine.announced_tasks(), await self._in_ledger()):
            found.setdefault(each.task, []).append(each)
        tasks = [TaskInfo(task=name, schemas=tuple(schemas)) for name, schemas in found.items()]
        return [task for task in tasks if not queues or task.latest.queue in queues]

    async def get(self, principal: Principal, task: str) -> TaskInfo:
        """Get one task. Raises `TaskNotAnnounced`."""
        for each in await self.list(principal):
            if each.task == task:
                return each
        raise TaskNotAnnounced(task[:200])

    async def _in_ledger(self) -> Sequence[AnnouncedTask]:
        if self._ledger is None or self._ledger.projection is None:
            return ()
        try:
            return await self._ledger.operators.announced_tasks()
        except LedgerUnavailable as exc:
            _log.warning("cannot read announced tasks from the ledger: %s", exc)
            return ()
