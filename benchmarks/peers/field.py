"""Who takes part, at which settings, and how to see that a peer has settled every job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.model import DBOS, PGQUEUER, PROCRASTINATE

ON_REDIS: Final = "Redis"
ON_POSTGRES: Final = "PostgreSQL"
_ONE_BY_ONE: Final = "one by one: it has no other way"
_CALLERS: Final = "100 callers at once: it has no call for many"


@dataclass(frozen=True, slots=True)
class Peer:
    """One peer. What its script is asked: see the package."""

    #: As in `venv.PEERS`.
    name: str
    #: As the report calls it.
    side: str
    store: str
    #: In words, for the report.
    settings: str
    bulk: str
    #: Ten at a time, for the test with kill -9, at its defaults.
    slow: str
    #: What else is set against crashes as "(tuned)"; empty where its documentation has nothing that acts in time.
    tuned: str = ""
    #: Slow ones get a share of the jobs in bulk: a rate does not need as many.
    share: float = 1.0
    #: On PostgreSQL: how many jobs are not settled in its own tables.
    left: str = ""

    @property
    def module(self) -> str:
        return f"benchmarks.peers.with_{self.name}"

    @property
    def tuned_side(self) -> str:
        return f"{self.side} (tuned)"


FIELD: Final = (
    Peer(
        "celery",
        "celery",
        ON_REDIS,
        "solo pool, results and events off, JSON",
        "groups of 1,000",
        "10 processes, prefetch 4 each",
        "late acknowledgement, prefetch 1, visibility timeout 10 s (an hour), looked after every 2 s (100 s)",
        share=0.15,
    ),
    Peer(
        "dramatiq",
        "dramatiq",
        ON_REDIS,
        "1 thread, prefetch 500, worker timeout 10 ms, default middleware",
        _ONE_BY_ONE,
        "10 threads",
        "heartbeat timeout 10 s (a minute), maintenance chance 10 % (0.1 %)",
        share=0.5,
    ),
    Peer(
        "rq",
        "rq",
        ON_REDIS,
        "SimpleWorker, results off",
        "enqueue_many of 1,000",
        "worker pool of 10 forking workers",
        share=0.05,
    ),
    Peer(
        "arq",
        "arq",
        ON_REDIS,
        "500 coroutines, poll 10 ms, results off, uvloop",
        _CALLERS,
        "10 coroutines, poll 500 ms",
        "job time-out 1 s (300 s)",
        share=0.2,
    ),
    Peer(
        "taskiq",
        "taskiq",
        ON_REDIS,
        "stream broker, 100 coroutines, results and parsing of arguments off, uvloop",
        _ONE_BY_ONE,
        "10 coroutines",
        "idle timeout 10 s (ten minutes), lock timeout 5 s (none), 1 fetched at once (100); looks when new ones come",
        share=0.4,
    ),
    Peer(
        "saq",
        "saq",
        ON_REDIS,
        "10 coroutines, finished jobs not kept, uvloop",
        _CALLERS,
        "10 coroutines",
        "5 tries (1), job time-out 2 s (10 s), sweep every second (60 s)",
        share=0.2,
    ),
    Peer(
        "streaq",
        "streaq",
        ON_REDIS,
        "64 coroutines, results off, uvloop",
        "enqueue_many of 500",
        "10 coroutines",
        "idle timeout 10 s (60 s)",
        share=0.1,
    ),
    Peer(
        "huey",
        "huey",
        ON_REDIS,
        "1 thread, results off, blocking pop",
        _ONE_BY_ONE,
        "10 threads",
        share=0.5,
    ),
    Peer(
        "docket",
        "docket",
        ON_REDIS,
        "20 coroutines, check interval 5 ms, finished tasks not kept, uvloop",
        "10 callers at once: it has no call for many",
        "10 coroutines",
        "redelivery timeout 10 s (five minutes)",
        share=0.15,
    ),
    Peer(
        "taskito",
        "taskito",
        ON_REDIS,
        "1 thread, batches of 500, poll 2 ms, push dispatch",
        "map of 1,000",
        "10 threads",
        "task time-out 5 s (300 s)",
        share=0.1,
    ),
    Peer(
        "pgqueuer",
        PGQUEUER,
        ON_POSTGRES,
        "batches of 500, asyncpg, uvloop",
        "enqueue of 1,000",
        "batches of 5, 10 coroutines",
        "heartbeat timeout 10 s (30 s), dequeue timeout 2 s (30 s)",
        left="SELECT count(*) FROM pgqueuer",
    ),
    Peer(
        "procrastinate",
        PROCRASTINATE,
        ON_POSTGRES,
        "5 coroutines, psycopg's binary build, uvloop",
        "batch_defer of 1,000",
        "10 coroutines",
        "sign of life every 3 s (10 s), jobs tried again after 10 s without one (never), looked for every 2 s",
        share=0.05,
        left="SELECT count(*) FROM procrastinate_jobs WHERE status <> 'succeeded'",
    ),
    Peer(
        "dbos",
        DBOS,
        ON_POSTGRES,
        "100 workflows in threads, poll 10 ms",
        "100 enqueued in a transaction",
        "10 workflows in threads, poll 10 ms",
        share=0.05,
        left="SELECT count(*) FROM dbos.workflow_status WHERE status <> 'SUCCESS'",
    ),
)


def on(store: str) -> tuple[Peer, ...]:
    """Those with their jobs there."""
    return tuple(peer for peer in FIELD if peer.store == store)
