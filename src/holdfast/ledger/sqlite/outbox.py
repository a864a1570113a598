"""The outbox in a SQLite file, the ledger's own or the engine's: each of the relay's questions is one operation of the
file's writer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from holdfast.clock import Clock
from holdfast.engine.sqlite.transaction import Transaction, json_list
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
from holdfast.ledger.publishing import OUTBOX_NEWS
from holdfast.ledger.sqlite import outbox_statements as sql
from holdfast.ledger.sqlite.acts import SqliteActs
from holdfast.ledger.sqlite.store import SqliteStore


class SqliteOutbox(SqliteActs, SqlOutbox):
    """Times are the given clock's."""

    _store: SqliteStore

    def __init__(self, store: SqliteStore, clock: Clock) -> None:
        super().__init__(store, clock)
        self._waiting = ExitStack()
        self._turn: Turn | None = None
        self._number: int | None = None
        self._places = Places()

    async def open(self) -> None:
        await self._store.open()
        await self._make_lanes()

    async def close(self) -> None:
        """Nobody waits any longer. The file is the ledger's."""
        self._turn = None
        self._waiting.close()

    async def now_ms(self) -> int:
        return self._clock.now_ms()

    async def take_lanes(
        self, relay: str, destinations: Sequence[str], most: int, lease_ms: int, *, dead_blocks: bool = False
    ) -> list[int]:
        await self._make_lanes()
        # Before the look: what comes after it is news.
        self._listen()
        self._lease_ms = lease_ms
        asked = self._asked(relay, destinations, dead_blocks, WINDOW) | {"limit": 1}
        # Lazy: most looks find nothing, and need not keep others from writing.
        work = (_take, asked, list(destinations), self._places, most, lease_ms)
        lanes: list[int] = await self._store.write(*work, lazy=True)
        return sorted(lanes)

    async def due(
        self, relay: str, lanes: Sequence[int], destinations: Sequence[str], limit: int, *, dead_blocks: bool
    ) -> list[OutboxEvent]:
        asked = self._asked(relay, destinations, dead_blocks, window_for(limit, len(lanes))) | {"limit": limit}
        text = await self._store.write(_due, list(lanes), asked, list(destinations), self._places, lazy=True)
        return [event_of(row) for row in msgspec.json.decode(text)]

    def _asked(self, relay: str, destinations: Sequence[str], dead_blocks: bool, window: int) -> dict[str, Any]:
        return {
            "relay": relay,
            "destinations": json_list(list(destinations)),
            "dead_blocks": dead_blocks,
            "window": window,
            "now": self._clock.now_ms(),
        }

    async def mark(self, relay: str, lanes: Sequence[int], marks: Sequence[Mark]) -> bool:
        now_ms = self._clock.now_ms()
        rows = [mark_row(mark) for mark in marks]
        return await self._store.write(_mark, relay, sorted(set(lanes)), now_ms, now_ms + self._lease_ms, rows)

    async def wait(self, timeout_s: float) -> None:
        turn, loop = self._listen(), asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (left := deadline - loop.time()) > 0:
            if not await turn.wait(left) or await self._has_news():
                return

    def _listen(self) -> Turn:
        if self._turn is None:
            # Kept until the end: what is written while nobody waits is news for the next one who does.
            self._turn = self._waiting.enter_context(self._store.news.of(OUTBOX_NEWS))
        return self._turn

    async def _has_news(self) -> bool:
        """Whether it was about the outbox: others write all the time into an engine's file."""
        number, self._number = self._number, await self._store.write(_number, lazy=True)
        return number != self._number


# In the writer's thread ----------------------------------------------------------------------------


def _take(
    transaction: Transaction,
    asked: dict[str, Any],
    destinations: list[str],
    places: Places,
    most: int,
    lease_ms: int,
) -> list[int]:
    lanes = _ready(transaction, asked, destinations, places, most)
    if lanes:
        transaction.begin()
        # Looked at again: from here on nobody else writes.
        lanes = _json(transaction, sql.FREE, asked | {"lanes": json_list(lanes)})
        until = asked["now"] + lease_ms
        transaction.execute(sql.TAKE, {"relay": asked["relay"], "until": until, "lanes": json_list(lanes)})
    return lanes


def _ready(
    transaction: Transaction, asked: dict[str, Any], destinations: list[str], places: Places, most: int
) -> list[int]:
    looked = _json(transaction, sql.LOOK, asked)
    ready = {lane for lane, is_ready, _ in looked if is_ready}
    crowded = [lane for lane, _, is_crowded in looked if is_crowded]
    if crowded and len(ready) < most:
        walk = places.begin(crowded, destinations)
        last, found = _walk(transaction, walk, asked)
        # Where something was found `due` has to begin at the same place.
        places.go_on(walk, last, destinations, but=found)
        ready |= found.keys()
    return [lane for lane, *_ in looked if lane in ready][:most]


def _due(
    transaction: Transaction, lanes: list[int], asked: dict[str, Any], destinations: list[str], places: Places
) -> str:
    mine: list[int] = _json(transaction, sql.MINE, asked | {"lanes": json_list(lanes)})
    asked |= {"lanes": json_list(mine)}
    positions: set[int] = set(_json(transaction, sql.AGAIN, asked))
    seen: dict[tuple[int, str], list[bool]] = {}
    for lane, destination, position, blocked in _json(transaction, sql.SEEN, asked):
        seen.setdefault((lane, destination), []).append(bool(blocked))
        if not blocked:
            positions.add(position)
    crowded = {lane for (lane, _), blocked in seen.items() if any(blocked) and len(blocked) == asked["window"]}
    if crowded and len(positions) < asked["limit"]:
        walk = places.begin(sorted(crowded), destinations)
        last, found = _walk(transaction, walk, asked)
        places.go_on(walk, last, destinations)
        positions.update(*found.values())
    # Of each key these are the first, so that the first of all are, too.
    chosen = json_list(sorted(positions)[: asked["limit"]])
    (text,) = transaction.execute(sql.EVENTS, {"positions": chosen, "bytes": BATCH_BYTES}).fetchone()
    return str(text)


def _walk(
    transaction: Transaction, walk: Sequence[Place], asked: dict[str, Any]
) -> tuple[list[Place], dict[int, list[int]]]:
    """Where to go on, and what is due in lanes that are full of events behind others."""
    last, rows = _json(transaction, sql.WALK, asked | {"places": json_list(walk), "steps": STEPS})
    found: dict[int, list[int]] = {}
    for lane, position in rows:
        found.setdefault(lane, []).append(position)
    return last, found


def _mark(
    transaction: Transaction, relay: str, lanes: list[int], now_ms: int, until: int, marks: list[tuple[Any, ...]]
) -> bool:
    asked = {"relay": relay, "lanes": json_list(lanes), "now": now_ms, "until": until, "marks": json_list(marks)}
    if len(_json(transaction, sql.MINE, asked)) != len(lanes):
        return False
    transaction.execute(sql.RENEW, asked)
    transaction.execute(sql.MARK, asked)
    return True


def _json(transaction: Transaction, statement: str, asked: dict[str, Any]) -> Any:
    (text,) = transaction.execute(statement, asked).fetchone()
    return msgspec.json.decode(text)


def _number(transaction: Transaction) -> int:
    row = transaction.execute(sql.NUMBER).fetchone()
    return int(row[0]) if row else 0
