"""The outbox on PostgreSQL. Each of the relay's questions is one statement, so that no transaction stays open."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Final

import asyncpg
import msgspec

from holdfast.ledger.acts.outbox import (
    BATCH_BYTES,
    STEPS,
    WINDOW,
    Place,
    Places,
    SqlOutbox,
    event_of,
    mark_row,
    window_for,
)
from holdfast.ledger.news import Turn
from holdfast.ledger.outbox_store import Mark, OutboxEvent
from holdfast.ledger.postgres import outbox_statements as sql
from holdfast.ledger.postgres.acts import PostgresActs
from holdfast.ledger.postgres.news import News
from holdfast.ledger.postgres.store import PostgresStore

#: The trigger on the table tells it, whoever writes.
CHANNEL: Final = "holdfast_outbox"
#: How long to wait at most without looking: LISTEN does not work through every pooler.
_POLL_S: Final = 5.0


class PostgresOutbox(PostgresActs, SqlOutbox):
    """Times are the server's."""

    def __init__(self, store: PostgresStore) -> None:
        super().__init__(store)
        self._news = News(store.connect, store.name, CHANNEL)
        self._waiting = ExitStack()
        self._turn: Turn | None = None
        self._places = Places()

    async def open(self) -> None:
        await self._store.open()
        await self._make_lanes()

    async def close(self) -> None:
        """Stop listening. The ledger's connections are the ledger's."""
        self._turn = None
        self._waiting.close()
        await self._news.close()

    async def now_ms(self) -> int:
        (row,) = await self._store.fetch("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS ms")
        return int(row["ms"])

    async def take_lanes(
        self, relay: str, destinations: Sequence[str], most: int, lease_ms: int, *, dead_blocks: bool = False
    ) -> list[int]:
        await self._make_lanes()
        # Before the look: what comes after it is news.
        self._listen()
        self._lease_ms = lease_ms
        asked = (relay, list(destinations), timedelta(milliseconds=lease_ms), dead_blocks, WINDOW)
        rows = await self._store.fetch(sql.TAKE, *asked, most, [])
        taken, crowded = ([row["lane"] for row in rows if row["taken"] is ours] for ours in (True, False))
        if crowded and len(taken) < most:
            begin = self._places.begin(crowded, destinations)
            walk = (*_columns(begin), STEPS, list(destinations), dead_blocks)
            (row,) = await self._store.fetch(sql.WALK_LANES, *walk, 1, STEPS)
            ready = row["lanes"] or []
            # Where something was found `due` has to begin at the same place.
            self._places.go_on(begin, _places(row["last"]), destinations, but=ready)
            if ready:
                rows = await self._store.fetch(sql.TAKE, *asked, most - len(taken), ready)
                taken += [row["lane"] for row in rows if row["taken"]]
        return sorted(set(taken))

    async def due(
        self, relay: str, lanes: Sequence[int], destinations: Sequence[str], limit: int, *, dead_blocks: bool
    ) -> list[OutboxEvent]:
        asked = (relay, list(lanes), list(destinations), limit, dead_blocks)
        rows = await self._store.fetch(sql.DUE, *asked, window_for(limit, len(lanes)), BATCH_BYTES)
        found = _by_position(rows)
        if len(found) < limit and (crowded := rows[0]["crowded"]):
            begin = self._places.begin(crowded, destinations)
            walk = (*_columns(begin), STEPS, list(destinations), dead_blocks)
            rows = await self._store.fetch(sql.WALK, *walk, limit, limit, BATCH_BYTES)
            self._places.go_on(begin, _places(rows[0]["last"]), destinations)
            found |= _by_position(rows)
        # Of each key these are the first, so that the first of all are, too.
        return [event_of(found[position]) for position in sorted(found)[:limit]]

    async def mark(self, relay: str, lanes: Sequence[int], marks: Sequence[Mark]) -> bool:
        lease = timedelta(milliseconds=self._lease_ms)
        (row,) = await self._store.fetch(
            sql.MARK, relay, sorted(set(lanes)), lease, *_columns([mark_row(mark) for mark in marks], 6)
        )
        return bool(row["ours"])

    async def revive(self, tenants: Sequence[str] | None, ids: Sequence[str], actor: str, reason: str) -> int:
        revived = await super().revive(tenants, ids, actor, reason)
        if revived:
            await self._store.execute(f"NOTIFY {CHANNEL}")
        return revived

    async def wait(self, timeout_s: float) -> None:
        await self._listen().wait(min(timeout_s, _POLL_S))

    def _listen(self) -> Turn:
        if self._turn is None:
            # Kept until the end: what is written while nobody waits is news for the next one who does.
            self._turn = self._waiting.enter_context(self._news.of(""))
        return self._turn


def _by_position(rows: Sequence[asyncpg.Record]) -> dict[int, asyncpg.Record]:
    return {row["position"]: row for row in rows if row["position"] is not None}


def _places(last: str | None) -> list[Place]:
    return msgspec.json.decode(last, type=list[Place]) if last else []


def _columns(rows: Sequence[Sequence[Any]], width: int = 4) -> list[list[Any]]:
    return [[row[place] for row in rows] for place in range(width)]
