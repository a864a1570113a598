"""Who takes part, at which settings, and how to see that a peer has settled every job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.model import DBOS, PGQUEUER, PROCRASTINATE


@dataclass(frozen=True, slots=True)
class Peer:
    """One peer. Its script has the roles `produce` (install, bulk) and `work` (start, report)."""

    #: As in `venv.PEERS`.
    name: str
    side: str
    module: str
    #: How many jobs are not settled in its own tables.
    left: str
    #: Slow ones get a share of the jobs: a rate does not need as many.
    share: float = 1.0


FIELD: Final = (
    Peer("pgqueuer", PGQUEUER, "benchmarks.peers.with_pgqueuer", "SELECT count(*) FROM pgqueuer"),
    Peer(
        "procrastinate",
        PROCRASTINATE,
        "benchmarks.peers.with_procrastinate",
        "SELECT count(*) FROM procrastinate_jobs WHERE status <> 'succeeded'",
        share=0.05,
    ),
    Peer(
        "dbos",
        DBOS,
        "benchmarks.peers.with_dbos",
        "SELECT count(*) FROM dbos.workflow_status WHERE status <> 'SUCCESS'",
        share=0.05,
    ),
)
