"""Stores for crash points. Each is emptied for every run, ages by command, and lists what is left in it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import asyncpg
from redis.asyncio import Redis

from holdfast.clock import Clock, SystemClock
from holdfast.core.job import Priority
from holdfast.testing.inline import ManualClock
from tests.crash_points.seams import scripts
from tests.engine.harness import RedisHarness

#: Streams that hold history: bounded, and not about open jobs.
_KEPT: Final = ("feed", "result", "dlq", "wake", "notices")


class Stores:
    """Engine and ledger of one run."""

    #: Whether engine and ledger are two stores, of which one can be wiped.
    separate_ledger = False
    has_ledger = True
    clock: Clock

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def settings(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def ledger_url(self) -> str:
        """For the user's own connections."""
        raise NotImplementedError

    async def begin(self) -> None:
        """Empty the stores for a new run."""

    async def advance(self, ms: int) -> None:
        """Let time pass on the engine's clock."""

    def tick(self) -> None:
        """Advance a manual clock a little while a scenario polls."""

    async def wipe(self) -> None:
        """Delete all data of the engine."""

    async def leftovers(self) -> list[str]:
        """List what is in the engine's store although every job has ended."""
        return []

    async def end(self) -> None:
        """Clean up after a run."""


class SqliteStores(Stores):
    """One file, with a manual clock."""

    def __init__(self, folder: Path) -> None:
        super().__init__("sqlite")
        self._folder = folder
        self._path = folder / "none.db"
        self.clock = ManualClock()

    @property
    def settings(self) -> dict[str, Any]:
        return {"url": self.ledger_url}

    @property
    def ledger_url(self) -> str:
        return f"sqlite:///{self._path}"

    async def begin(self) -> None:
        self._path = self._folder / f"{secrets.token_hex(6)}.db"
        self.clock = ManualClock()

    async def advance(self, ms: int) -> None:
        assert isinstance(self.clock, ManualClock)
        self.clock.advance(ms / 1000)

    def tick(self) -> None:
        assert isinstance(self.clock, ManualClock)
        self.clock.advance(0.1)

    async def end(self) -> None:
        _remove(self._path)


class RedisStores(Stores):
    """A namespace of a real server, with or without a ledger in another store."""

    def __init__(self, url: str, ledger: Callable[[], str] | None = None, name: str = "redis") -> None:
        super().__init__(name)
        self._url = url
        self._ledger = ledger
        self._ledger_url = ""
        self._namespace = ""
        self._loaded = False
        self.clock = SystemClock()
        self.has_ledger = self.separate_ledger = ledger is not None

    @property
    def settings(self) -> dict[str, Any]:
        ledger = {"ledger": self._ledger_url} if self._ledger_url else {}
        return {"url": self._url, "namespace": self._namespace, "feed_tail": 0, **ledger}

    @property
    def ledger_url(self) -> str:
        return self._ledger_url

    async def begin(self) -> None:
        self._namespace = f"crash-{secrets.token_hex(6)}"
        if not self._loaded:
            # Scripts that the server has not cached would add calls to the run.
            client: Any = Redis.from_url(self._url)
            async with client as redis:
                for script in scripts():
                    await redis.script_load(script.source)
            self._loaded = True
        if self._ledger is not None:
            self._ledger_url = self._ledger()
            if self._ledger_url.startswith("postgres"):
                await _empty(self._ledger_url)

    async def advance(self, ms: int) -> None:
        harness = RedisHarness(self._url, self._namespace)
        await harness.advance(ms)
        await harness.redis.aclose()

    async def wipe(self) -> None:
        await RedisHarness(self._url, self._namespace).close()

    async def write(self, fields: dict[str, str]) -> None:
        """Write a message as another program does: by a plain XADD."""
        harness = RedisHarness(self._url, self._namespace)
        await harness.redis.xadd(harness.keys("default").streams[Priority.NORMAL], fields)
        await harness.redis.aclose()

    async def dead_letters(self) -> list[dict[bytes, bytes]]:
        """Read the engine's dead letters."""
        harness = RedisHarness(self._url, self._namespace)
        entries = await harness.redis.xrange(harness.keys("default").dlq)
        await harness.redis.aclose()
        return [fields for _, fields in entries]

    async def leftovers(self) -> list[str]:
        """List streams and sets that still hold open jobs."""
        harness = RedisHarness(self._url, self._namespace)
        leftovers = []
        async for keys in harness._own_keys():
            for key in keys:
                leftovers += await self._left(harness.redis, key)
        await harness.redis.aclose()
        return leftovers

    async def _left(self, redis: Any, key: bytes) -> list[str]:
        kind = (await redis.type(key)).decode()
        name = key.decode().removeprefix(f"{self._namespace}:")
        if kind == "stream" and not any(word in name for word in _KEPT):
            length = await redis.xlen(key)
            if length:
                return [f"{name} has {length} entries"]
        if kind == "zset":
            count = await redis.zcard(key)
            if count and any(word in name for word in ("retry", "delayed", "waiting", "held", "suspended")):
                return [f"{name} has {count} members"]
        return []

    async def end(self) -> None:
        await self.wipe()
        if self._ledger_url.startswith("sqlite:"):
            _remove(Path(self._ledger_url.removeprefix("sqlite:///")))


_TABLES: Final = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'holdfast_version'"


async def _empty(url: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        names = [row[0] for row in await connection.fetch(_TABLES)]
        filled = " UNION ALL ".join(f"SELECT '{name}' WHERE EXISTS (SELECT FROM \"{name}\")" for name in names)
        if tables := [f'"{row[0]}"' for row in await connection.fetch(filled)]:
            await connection.execute(f"TRUNCATE {', '.join(tables)} RESTART IDENTITY CASCADE")
    finally:
        await connection.close()


def _remove(path: Path) -> None:
    """Remove a SQLite file with its journal files."""
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink(missing_ok=True)
