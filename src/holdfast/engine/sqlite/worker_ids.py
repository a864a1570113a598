"""Stable identities of workers on SQLite: one row for each start in each queue; the latest start has the id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from holdfast.engine.port.worker_ids import KEEP_ID_MS, WorkerIdStatus, WorkerStart
from holdfast.engine.sqlite.store import EngineContext
from holdfast.sqlite.transaction import Transaction, json_list

_GENERATION: Final = msgspec.json.Decoder(tuple[int])
#: Generation and worker of the latest start.
_LATEST: Final = msgspec.json.Decoder(tuple[int, str])


def next_generation(transaction: Transaction, policy: EngineContext, worker_id: str, queues: Sequence[str]) -> int:
    """A generation higher than that of every start of this id. Lazy."""
    (latest,) = transaction.rows("last_generation", _GENERATION, queues=json_list(list(queues)), worker_id=worker_id)
    return max(policy.clock.now_ms(), latest + 1)


def keep(transaction: Transaction, policy: EngineContext, start: WorkerStart, queues: Sequence[str]) -> WorkerIdStatus:
    """Take or keep an id for one start, unless a later one has it."""
    now_ms = policy.clock.now_ms()
    before = now_ms - KEEP_ID_MS - policy.options.visibility_timeout_ms
    predecessors: dict[str, None] = {}
    successor = ""
    for queue in queues:
        transaction.run("delete_old_worker_starts", queue=queue, before=before)
        latest = transaction.rows("latest_worker_start", _LATEST, queue=queue, worker_id=start.worker_id)
        is_replaced = latest > (start.generation, start.worker)
        if is_replaced:
            successor = latest[1]
        elif latest[1] not in ("", start.worker):
            predecessors[latest[1]] = None
        transaction.run(
            "keep_worker_start",
            queue=queue,
            worker_id=start.worker_id,
            generation=start.generation,
            worker=start.worker,
            now=now_ms,
            replaced_at=now_ms if is_replaced else None,
        )
    return WorkerIdStatus(tuple(predecessors), successor)
