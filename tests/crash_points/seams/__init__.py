"""Where calls leave for a store, and how one of them fails.

A `Seam` stands at the last place in this process that every call to a store passes:

- Redis: `Connection.call`, one command or script on one socket;
- PostgreSQL: the driver's protocol object, one statement, COPY or COMMIT (SQLAlchemy's reads pass it, too);
- SQLite: the writer's transaction, a reader's question, a query of SQLAlchemy.

Each call has a name (`submit`, `COMMIT after INSERT dlq_items`, …), and is told from others of its name by counting. At
one of them something happens, by `Way`. Everything else goes through untouched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import asyncpg

from holdfast.engine.redis.net.connection import PipelinedConnection
from holdfast.sqlite.connection import ReaderThread
from holdfast.sqlite.writer import Writer
from tests.crash_points.seams import postgres, redis, sqlite
from tests.crash_points.seams.open_handles import Opened
from tests.crash_points.seams.postgres import outside
from tests.crash_points.seams.redis import scripts
from tests.crash_points.seams.seam import Call, Point, Seam, Way, points_of

__all__ = ["Call", "Point", "Seam", "Way", "installed", "outside", "points_of", "scripts"]


@contextmanager
def installed(seam: Seam) -> Iterator[None]:
    """Every store of this process behind the seam, and nobody waits before trying again."""
    opened = Opened()
    with (
        patch.object(PipelinedConnection, "call", redis.call_through(seam, opened)),
        patch.object(asyncpg.Connection, "__init__", postgres.connecting_through(seam, opened)),
        patch.object(Writer, "perform", sqlite.writing_through(seam)),
        patch.object(ReaderThread, "run", sqlite.reading_through(seam)),
        patch("holdfast.core.retry.Backoff.next_s", _at_once),
        sqlite.queries_through(seam),
    ):
        seam.abandon = opened.abandon
        yield


def _at_once(backoff: Any) -> float:
    backoff.failures += 1
    return 0.001
