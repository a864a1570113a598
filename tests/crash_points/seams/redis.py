"""The injection point for Redis: `Connection.call`, one command or script on one socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any, Final

from holdfast.engine.redis.net.connection import PipelinedConnection
from holdfast.engine.redis.net.script import Script
from tests.crash_points.seams.open_handles import OpenHandles
from tests.crash_points.seams.seam import Seam


@cache
def scripts() -> list[Any]:
    """All scripts of the engine, as it sends them."""
    folder = files("holdfast.engine.redis") / "lua"
    names = sorted(file.name.removesuffix(".lua") for file in folder.iterdir() if file.name.endswith(".lua"))
    return [Script(name) for name in names if not name.startswith("_")]


#: Commands and scripts that only read. `XREADGROUP` is not one of them: it changes the pending list.
_READS: Final = frozenset(
    [
        "EXISTS",
        "GET",
        "HGET",
        "HGETALL",
        "HMGET",
        "INFO",
        "MGET",
        "PING",
        "SMEMBERS",
        "TIME",
        "TYPE",
        "XINFO",
        "XLEN",
        "XPENDING",
        "XRANGE",
        "XREAD",
        "XREVRANGE",
        "ZCARD",
        "ZRANGE",
        "ZRANGEBYSCORE",
        "ZSCORE",
        "find_due",
        "find_expired",
        "get",
        "snapshot",
        "stats",
        "workers",
    ]
)
#: Commands that only set up a connection.
_HANDSHAKE: Final = frozenset({"AUTH", "SELECT", "HELLO", "SCRIPT"})


def call_through(seam: Seam, handles: OpenHandles) -> Callable[..., Any]:
    original = PipelinedConnection.call
    names = {script.sha: script.name for script in scripts()}

    def call(self: PipelinedConnection, *command: Any, blocks_s: float = 0.0) -> Any:
        handles.add_redis(self)
        word = _text(command[0]).upper()
        if word in _HANDSHAKE or seam.disabled:
            return original(self, *command, blocks_s=blocks_s)
        name = names.get(command[1], word) if word == "EVALSHA" else word
        return asyncio.ensure_future(
            seam.through(
                name,
                lambda: original(self, *command, blocks_s=blocks_s),
                lambda: ConnectionResetError("the connection was cut"),
                self.close,
                changes=name not in _READS,
            )
        )

    return call


def _text(word: Any) -> str:
    return word.decode() if isinstance(word, bytes) else str(word)
