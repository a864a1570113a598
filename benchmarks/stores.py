"""Stores of jobs: a Redis server or a SQLite file, empty for every probe."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final, Protocol

import redis

from holdfast.verification.chaos.servers import RedisServer
from tools.servers import REDIS, find

#: Redis keeps them out of the way of measurements; persistence as asked.
_OPTIONS: Final = {"no": {}, "everysec": {"appendfsync": "everysec"}, "always": {"appendfsync": "always"}}


class Store(Protocol):
    """What the stages need of either."""

    name: str

    @property
    def url(self) -> str: ...
    def reset(self) -> None:
        """Empty, as on the first day."""
        ...

    def used_bytes(self) -> int:
        """What its data takes now."""
        ...

    def cpu_s(self) -> float:
        """CPU time of the server so far; 0 if there is none."""
        ...


class RedisStore(Store):
    """One `redis-server` process."""

    name = "Redis"

    def __init__(self, folder: Path, aof: str) -> None:
        binary = find(REDIS)
        if binary is None:
            raise SystemExit(f"no redis-server here; run: {REDIS.how_to_install}")
        options = {"appendonly": "no" if aof == "no" else "yes", **_OPTIONS[aof]}
        self._server = RedisServer(binary, folder, options)
        self._server.start()
        self.client = redis.Redis(port=self._server.port)

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def version(self) -> str:
        return str(self._info("server")["redis_version"])

    def reset(self) -> None:
        self.client.flushall()

    def used_bytes(self) -> int:
        return int(self._info("memory")["used_memory"])

    def key_bytes(self, key: str) -> int:
        """What one key takes, every part of it counted; 0 if it is not there."""
        return int(self.client.memory_usage(key, samples=0) or 0)

    def cpu_s(self) -> float:
        used = self._info("cpu")
        return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])

    def keys(self) -> int:
        """How many keys it has."""
        return int(self.client.dbsize())

    def close(self) -> None:
        self.client.close()
        self._server.stop()

    def _info(self, section: str) -> dict[str, str | int | float]:
        return dict(self.client.info(section))


class SqliteStore(Store):
    """A new file for each probe, in a separate folder."""

    name = "SQLite"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self.reset()

    @property
    def url(self) -> str:
        return f"sqlite:///{self._folder / str(self._number) / 'bench.db'}"

    def reset(self) -> None:
        shutil.rmtree(self._folder / str(self._number), ignore_errors=True)
        self._number += 1
        (self._folder / str(self._number)).mkdir(parents=True)

    def used_bytes(self) -> int:
        files = (self._folder / str(self._number)).iterdir()
        return sum(file.stat().st_size for file in files if not file.name.endswith("-shm"))

    def cpu_s(self) -> float:
        return 0.0
