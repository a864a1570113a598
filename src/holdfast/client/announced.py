"""Tasks that workers have announced, for submissions without an app: `holdfast submit`, HTTP without an app.

The job goes to the task's own queue, and its payload is checked. A task that no worker ever announced is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.core.announcement import AnnouncedTask, choose
from holdfast.core.text import check_name
from holdfast.engine.port import Engine
from holdfast.errors import TaskNotAnnounced

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger

#: How long announcements are used before they are read again.
_FRESH_S: Final = 5.0
#: Similar names suggested for an unknown task.
_NEAREST: Final = 3


class AnnouncedTasks:
    """Finds announcements; those of the engine are cached for a few seconds."""

    def __init__(self, engine: Callable[[], Engine], ledger: Callable[[], Ledger | None]) -> None:
        self._engine = engine
        self._ledger = ledger
        self._known: dict[str, list[AnnouncedTask]] = {}
        self._fresh_until = 0.0

    async def require(self, task: str, payload: bytes, *, force: bool) -> AnnouncedTask | None:
        """The announcement that the payload fits.

        Raises `TaskNotAnnounced` or `InvalidPayload`. With `force` neither: the latest announcement, without a
        fingerprint because the payload was not checked, or None.
        """
        check_name(task, "task")
        found = await self.find(task)
        if force:
            return msgspec.structs.replace(found[0], fingerprint="") if found else None
        found = found or await self._find_in_ledger(task)
        if not found:
            raise TaskNotAnnounced(task, get_close_matches(task, self._known, _NEAREST))
        return choose(task, payload, found)

    async def find(self, task: str) -> Sequence[AnnouncedTask]:
        """Announcements of a task in the engine, the latest first."""
        if time.monotonic() < self._fresh_until and task in self._known:
            return self._known[task]
        known: dict[str, list[AnnouncedTask]] = {}
        for each in await self._engine().announced_tasks():
            known.setdefault(each.task, []).append(each)
        self._known, self._fresh_until = known, time.monotonic() + _FRESH_S
        return known.get(task, ())

    async def _find_in_ledger(self, task: str) -> Sequence[AnnouncedTask]:
        """Announcements of a task in a separate ledger: the engine may have been wiped."""
        ledger = self._ledger()
        if ledger is None or ledger.projection is None:
            return ()
        return [each for each in await ledger.operators.announced_tasks() if each.task == task]
