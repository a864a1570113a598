"""Stores to crash on. Each is emptied for every run, ages by command, and tells what is left in it."""

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

#: Streams that tell of what was: bounded, and not about open jobs.
_KEPT: Final = ("feed", "result", "dlq", "wake", "notices")


class Place:
    """Engine and ledger of one run."""

    #: Whether engine and ledger are two stores, of which one can be wiped.
    apart = False
    has_ledger = True
    clock: Clock

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def settings(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def ledger_url(self) -> str:
        """For connections of the user's own."""
        raise NotImplementedError

    async def begin(self) -> None:
        """Empty, and as old as it is now."""

    async def advance(self, ms: int) -> None:
        """Let time pass on the engine's clock."""

    def tick(self) -> None:
        """While somebody waits, a clock that stands still goes on a little."""

    async def wipe(self) -> None:
        """The engine has lost everything."""

    async def leftovers(self) -> list[str]:
        """What is in the engine's store although every job has ended."""
        return []

    async def end(self) -> None:
        """Clean up after a run."""


class SqlitePlace(Place):
    """One file; time is a number."""

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


class RedisPlace(Place):
    """A namespace of a real server, with or without a ledger beside it."""

    def __init__(self, url: str, ledger: Callable[[], str] | None = None, name: str = "redis") -> None:
        super().__init__(name)
        self._url = url
        self._ledger = ledger
        self._ledger_url = ""
        self._namespace = ""
        self._loaded = False
        self.clock = SystemClock()
        self.has_ledger = self.apart = ledger is not None

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
            # Whether the server knows them already must not change which calls there are.
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
        """As another program does: a plain XADD."""
        harness = RedisHarness(self._url, self._namespace)
        await harness.redis.xadd(harness.keys("default").streams[Priority.NORMAL], fields)
        await harness.redis.aclose()

    async def letters(self) -> list[dict[bytes, bytes]]:
        """The engine's dead letters."""
        harness = RedisHarness(self._url, self._namespace)
        entries = await harness.redis.xrange(harness.keys("default").dlq)
        await harness.redis.aclose()
        return [fields for _, fields in entries]

    async def leftovers(self) -> list[str]:
        """Streams, sets and records of open jobs; consumers with leases."""
        harness = RedisHarness(self._url, self._namespace)
        left = []
        async for keys in harness._own_keys():
            for key in keys:
                left += await self._left(harness.redis, key)
        await harness.redis.aclose()
        return left

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
    """A file of SQLite with all that lies beside it."""
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink(missing_ok=True)
