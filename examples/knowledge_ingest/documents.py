"""Mode `kafka`: write the document's row and its event in one transaction of PostgreSQL.

Both are written or neither is. A relay publishes the event to Kafka, and a trigger submits a job for it. Both tables
are in the ledger's database.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import uuid4

import asyncpg

from knowledge_ingest.settings import KAFKA, TOPIC
from knowledge_ingest.tasks import app

_TABLE: Final = """
    CREATE TABLE IF NOT EXISTS knowledge_documents (
        document_id text PRIMARY KEY, title text NOT NULL, text text NOT NULL, uploaded_at timestamptz NOT NULL
    )
"""
_SAVE: Final = """
    INSERT INTO knowledge_documents VALUES ($1, $2, $3, now())
    ON CONFLICT (document_id) DO UPDATE SET title = $2, text = $3, uploaded_at = now()
"""
_EVENT: Final = "SELECT status, attempt_count, next_retry_at, last_error FROM outbox_events WHERE id = $1"


class Documents:
    """A pool of connections to PostgreSQL for the web server."""

    def __init__(self) -> None:
        self._pool: Any = None

    async def open(self) -> None:
        self._pool = await asyncpg.create_pool(app.settings.ledger, min_size=1, max_size=5)
        async with self._pool.acquire() as connection:
            await connection.execute(_TABLE)

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()

    async def save(self, document_id: str, title: str, text: str) -> str:
        """Save a document and its event; returns the event's id. Events of a document are published in upload order."""
        event_id = uuid4().hex
        announced = {"document_id": document_id, "title": title, "text": text}
        async with self._pool.acquire() as connection, connection.transaction():
            await connection.execute(_SAVE, document_id, title, text)
            return await app.outbox.add(
                connection,
                TOPIC,
                key=document_id,
                payload=announced,
                # Identifies the job that the trigger submits.
                headers={"x-trace-id": event_id},
                destination=KAFKA,
                event_id=event_id,
            )

    async def event(self, event_id: str) -> dict[str, Any] | None:
        """The state of an event; None if it is unknown or has been pruned."""
        row = await self._pool.fetchrow(_EVENT, event_id)
        return None if row is None else dict(row)
