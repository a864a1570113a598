"""The injection points of calls to the stores, and how one of the calls fails.

A `Seam` is the last point in this process that every call to a store passes:

- Redis: `Connection.call`, one command or script on one socket;
- PostgreSQL: the driver's protocol object, one statement, COPY or COMMIT (including SQLAlchemy's reads);
- SQLite: the writer's transaction, a reader's query, a query of SQLAlchemy.

Each call has a name (`submit`, `COMMIT after INSERT dlq_items`, …) and a number among the calls of that name. One of
them fails, by its `Way`. All others pass through unchanged.
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
from tests.crash_points.seams.open_handles import OpenHandles
from tests.crash_points.seams.postgres import bypass_seam
from tests.crash_points.seams.redis import scripts
from tests.crash_points.seams.seam import Call, Point, Seam, Way, select_points

__all__ = ["Call", "Point", "Seam", "Way", "bypass_seam", "install_seam", "scripts", "select_points"]


@contextmanager
def install_seam(seam: Seam) -> Iterator[None]:
    """Put the seam before every store of this process, and remove the pauses before retries."""
    handles = OpenHandles()
    with (
        patch.object(PipelinedConnection, "call", redis.call_through(seam, handles)),
        patch.object(asyncpg.Connection, "__init__", postgres.connecting_through(seam, handles)),
        patch.object(Writer, "perform", sqlite.writing_through(seam)),
        patch.object(ReaderThread, "run", sqlite.reading_through(seam)),
        patch("holdfast.core.retry.Backoff.next_s", _at_once),
        sqlite.queries_through(seam),
    ):
        seam.abandon = handles.abandon
        yield


def _at_once(backoff: Any) -> float:
    backoff.failures += 1
    return 0.001
