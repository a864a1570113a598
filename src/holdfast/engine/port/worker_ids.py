"""`WorkerIdPort`: stable identities of workers, of which one start has each at a time.

A worker with an id that starts again takes it from its previous start, also from one that still runs. Starts of one id
are ordered by generation, not by the order of calls, so that of several at the same time one has the id in every queue
and the others have it in none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import msgspec

from holdfast.engine.port.reads import Finding

#: How long a start is kept after its last call.
KEEP_ID_MS: Final = 3_600_000
#: How long it is kept that a running start was replaced.
KEEP_REPLACED_MS: Final = 3_600_000
#: `diagnose` reports an id if this many of its starts were replaced within `KEEP_REPLACED_MS` while they ran.
MANY_REPLACED: Final = 3


class WorkerStart(msgspec.Struct, frozen=True):
    """One start of a worker with an id. Of two, the later one has the id; of equal generations, the greater name."""

    worker_id: str
    #: The incarnation.
    worker: str
    generation: int


class WorkerIdStatus(msgspec.Struct, frozen=True):
    """Who has an id."""

    #: Earlier starts that had it until this call.
    predecessors: tuple[str, ...] = ()
    #: A later start that has it now; empty: the caller has it.
    successor: str = ""


class WorkerIdPort(Protocol):
    """Which start has a worker's id. None of these methods changes a job."""

    async def next_generation(self, worker_id: str, queues: Sequence[str]) -> int:
        """Return a generation higher than that of every start of this id; starts at the same time may get the same."""
        ...

    async def keep_worker_id(self, start: WorkerStart, queues: Sequence[str]) -> WorkerIdStatus:
        """Take or keep the id in these queues, unless a later start has it in one of them. Can be repeated.

        Call it at every heartbeat: a start that is replaced learns it here, and only then is it counted by `diagnose`.
        """
        ...


def replaced_findings(replaced: Iterable[tuple[str, str]]) -> list[Finding]:
    """A finding for each id that is replaced often, from id and worker of the starts that were replaced."""
    counts = Counter(worker_id for worker_id, _ in set(replaced))
    many = sorted((worker_id, count) for worker_id, count in counts.items() if count >= MANY_REPLACED)
    return [
        Finding(
            f"worker id {worker_id}",
            False,
            f"several processes use it: {count} of them were replaced by another within the last hour",
            "give each replica its own id (--id, HOLDFAST_WORKER_ID), for example the name of its StatefulSet pod",
            warning=True,
        )
        for worker_id, count in many
    ]
