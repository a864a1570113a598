"""Stable identities of workers on Redis: per queue a hash of ids, and a set of starts that were replaced.

Both expire when no worker uses an id. Other programs may write there: what cannot be read is overwritten or skipped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from holdfast.engine.port.worker_ids import (
    KEEP_ID_MS,
    KEEP_REPLACED_MS,
    WorkerIdStatus,
    WorkerStart,
)
from holdfast.engine.redis import wire
from holdfast.engine.redis.net.client import Purpose
from holdfast.engine.redis.net.errors import ScriptError
from holdfast.engine.redis.store import RedisStore

#: Replaced starts that are read.
_MAX_REPLACED: Final = 1_000
#: A replaced start: its id and its worker.
_START: Final = re.compile(rb"([!-~]{1,128}) (.{1,1000})", re.DOTALL)


class WorkerIds:
    """Which start of a worker has an id, queue by queue."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def next_generation(self, worker_id: str, queues: Sequence[str]) -> int:
        async def step(queue: str) -> int:
            word, generation = await self._call(queue, worker_id, "", "")
            return int(generation) if word == b"next" else await self._store.now_ms(queue)

        return max((await self._store.outages.for_each(queues, step)).values())

    async def keep(self, start: WorkerStart, queues: Sequence[str]) -> WorkerIdStatus:
        predecessors: dict[str, None] = {}
        successor = ""

        async def step(queue: str) -> bool:
            nonlocal successor
            word, *names = await self._call(queue, start.worker_id, start.worker, start.generation)
            worker = wire.printable(names[0]) if names else ""
            if word == b"replaced":
                successor = worker
            elif word == b"taken" and worker:
                predecessors[worker] = None
            return True

        await self._store.outages.for_each(queues, step)
        return WorkerIdStatus(tuple(predecessors), successor)

    async def replaced(self, queue: str) -> list[tuple[str, str]]:
        """Id and worker of the starts that were replaced while they ran."""
        store, key = self._store, self._store.keys(queue).replaced_workers
        try:
            rows = await store.client.call(Purpose.OTHER, b"ZRANGE", key, 0, _MAX_REPLACED - 1, b"WITHSCORES")
        except ScriptError:
            # Not a set of holdfast's.
            return []
        since = await store.now_ms(queue) - KEEP_REPLACED_MS if rows else 0
        recent = [member for member, at in zip(rows[::2], rows[1::2], strict=True) if float(at) > since]
        starts = [start for member in recent if (start := _START.fullmatch(member))]
        return [(wire.printable(start[1]), wire.printable(start[2])) for start in starts]

    async def _call(self, queue: str, worker_id: str, worker: str, generation: int | str) -> Any:
        keys, keep_ms = self._store.keys(queue), KEEP_ID_MS + self._store.options.visibility_timeout_ms
        reply = await self._store.run(
            Purpose.OTHER,
            "keep_worker_id",
            queue,
            [keys.worker_ids, keys.replaced_workers],
            [worker_id, worker, generation, keep_ms, KEEP_REPLACED_MS],
        )
        if reply[0] == b"unreadable":
            self._store.note_unreadable(queue, "key", reply[1:])
        return reply
