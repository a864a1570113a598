"""Announced tasks on Redis: one hash for all queues, with a field for each schema of a task.

Fields are `<fingerprint> <task>`, values JSON. Other programs may write there: what cannot be read is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from holdfast.core.announcement import KEEP_MS, AnnouncedTask, newest_first
from holdfast.engine.redis.net.client import Purpose
from holdfast.engine.redis.store import RedisStore

_decode: Final = msgspec.json.Decoder(AnnouncedTask).decode
#: Fields in one command.
_CHUNK: Final = 100


class Announcements:
    """The announced tasks of one namespace."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        #: Tasks whose old schemas this process has deleted.
        self._pruned: set[str] = set()

    async def announce(self, tasks: Sequence[AnnouncedTask]) -> None:
        if not tasks:
            return
        now_ms = await self._store.now_ms()
        for start in range(0, len(tasks), _CHUNK):
            values: list[Any] = []
            for task in tasks[start : start + _CHUNK]:
                values += (_field(task), msgspec.json.encode(msgspec.structs.replace(task, seen_at_ms=now_ms)))
            await self._call(b"HSET", *values)
        await self._prune({task.task for task in tasks}, now_ms - KEEP_MS)

    async def read(self) -> list[AnnouncedTask]:
        return newest_first(task for _, task in await self._read())

    async def _read(self) -> list[tuple[bytes, AnnouncedTask]]:
        return parse_announcements(await self._call(b"HGETALL"))

    async def _prune(self, tasks: set[str], before_ms: int) -> None:
        """Delete old schemas of tasks that were just announced; once per process."""
        if tasks <= self._pruned:
            return
        old = [field for field, task in await self._read() if task.task in tasks and task.seen_at_ms < before_ms]
        for start in range(0, len(old), _CHUNK):
            await self._call(b"HDEL", *old[start : start + _CHUNK])
        self._pruned |= tasks

    async def _call(self, command: bytes, *arguments: Any) -> Any:
        return await self._store.client.call(Purpose.OTHER, command, self._store.names.tasks, *arguments)


def parse_announcements(fields: Sequence[bytes]) -> list[tuple[bytes, AnnouncedTask]]:
    """The announcements in a hash, with their fields."""
    found: list[tuple[bytes, AnnouncedTask]] = []
    for field, value in zip(fields[::2], fields[1::2], strict=True):
        try:
            found.append((field, _decode(value)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return found


def _field(task: AnnouncedTask) -> str:
    return f"{task.fingerprint} {task.task}"
