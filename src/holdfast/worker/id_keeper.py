"""`IdKeeper`: the stable identity of a worker, kept for one start of it.

The first call takes the id from earlier starts and lets their leases expire now, so that this worker and others
reclaim them as new attempts. An earlier start that still runs learns it at its next heartbeat and stops; until then the
fence keeps one outcome for each job.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from holdfast.engine.port import Engine
from holdfast.engine.port.worker_ids import WorkerStart

_log: Final = logging.getLogger("holdfast.worker")


class IdKeeper:
    """Keeps the id of one worker. `keep` is called at every heartbeat."""

    def __init__(self, worker_id: str, worker: str, queues: Sequence[str]) -> None:
        self._worker_id = worker_id
        self._worker = worker
        self._queues = tuple(queues)
        self._start: WorkerStart | None = None
        #: Earlier starts whose leases are still to expire.
        self._predecessors: dict[str, None] = {}

    async def keep(self, engine: Engine) -> str:
        """Take or keep the id; returns the later start that has it now, or ''."""
        if self._start is None:
            generation = await engine.next_generation(self._worker_id, self._queues)
            self._start = WorkerStart(self._worker_id, self._worker, generation)
        status = await engine.keep_worker_id(self._start, self._queues)
        if status.successor:
            return status.successor
        # Kept until it is done: the call above names a predecessor once.
        self._predecessors |= dict.fromkeys(status.predecessors)
        for predecessor in list(self._predecessors):
            count = 0
            while expired := await engine.expire_leases(predecessor, self._queues):
                count += expired
            del self._predecessors[predecessor]
            _log.info("worker id %s: %s replaces %s, %d leases", self._worker_id, self._worker, predecessor, count)
        return ""
