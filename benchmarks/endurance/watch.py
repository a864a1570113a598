"""What is looked at every few seconds, and by which limit each is judged."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import redis

from benchmarks.endurance.deployment import Deployment
from benchmarks.endurance.verdict import COUNT, LAG, LENGTH, MEMORY, Limit
from holdfast.engine.redis.keys import WAKE_GROUP, KeyNames, QueueKeys

#: The end of a series' name says what it is. None: reported, not judged.
LIMITS: Final[Mapping[str, Limit | None]] = {
    "memory, bytes": MEMORY,
    "file handles": COUNT,
    "threads": COUNT,
    "connections": COUNT,
    "consumers": COUNT,
    "entries": LENGTH,
    "pending": LENGTH,
    "members": LENGTH,
    "keys": LENGTH,
    "lag, s": LAG,
    "jobs/s": None,
    "size, bytes": None,
}

#: As many lanes as the submitter's tenants take, and one more: there must be no other.
_LANES: Final = 4
_KEYS: Final = QueueKeys("default", KeyNames())
_STREAMS: Final = {
    "results": _KEYS.result,
    "dead letters": _KEYS.dlq,
    "feed": _KEYS.feed,
    "wake-ups": _KEYS.wake,
    "notices": _KEYS.notices,
}
_SETS: Final = {
    "retries": _KEYS.retry,
    "delayed": _KEYS.delayed,
    "waiting retries": _KEYS.pending_retries,
    "unrecorded dead letters": _KEYS.dlq_pending,
    "workers": _KEYS.workers,
}
_CONNECTIONS: Final = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"


def limit_of(series: str) -> Limit | None:
    """By which the series is judged."""
    return next(limit for ending, limit in LIMITS.items() if series.endswith(ending))


class Watch:
    """Looks at one deployment."""

    def __init__(self, deployment: Deployment, pids: Mapping[str, int]) -> None:
        self._deployment = deployment
        self._pids = dict(pids)
        self._client = deployment.redis.client
        self._last = (time.monotonic(), deployment.executions())

    def read(self) -> dict[str, float]:
        """Everything now, by name."""
        values: dict[str, float] = {}
        for name, pid in self._pids.items():
            values |= {f"{name}: {what}": value for what, value in process(pid).items()}
        return values | self._redis() | self._postgres() | {"executed, jobs/s": self._rate()}

    def _rate(self) -> float:
        then, before = self._last
        self._last = now, executions = time.monotonic(), self._deployment.executions()
        return (executions - before) / max(now - then, 1e-9)

    def _redis(self) -> dict[str, float]:
        client = self._client
        streams = [stream for lane in range(_LANES) for stream in _KEYS.lane(lane)]
        pipe = client.pipeline(transaction=False)
        for stream in (*streams, *_STREAMS.values()):
            pipe.xlen(stream)
        for name in _SETS.values():
            pipe.zcard(name)
        pipe.dbsize()
        *lengths, keys = pipe.execute()
        by_name = dict(zip(_STREAMS, lengths[len(streams) :], strict=False))
        sizes = dict(zip(_SETS, lengths[len(streams) + len(_STREAMS) :], strict=True))
        pending, consumers = self._groups(streams)
        return {
            "Redis: memory, bytes": float(client.info("memory")["used_memory"]),
            "Redis: keys": float(keys),
            "Redis: connections": float(client.info("clients")["connected_clients"]),
            "streams: entries": float(sum(lengths[: len(streams)])),
            "streams: pending": float(pending),
            "streams: consumers": float(consumers),
            **{f"{name}: entries": float(length) for name, length in by_name.items()},
            **{f"{name}: members": float(length) for name, length in sizes.items()},
            "ledger: lag, s": self._lag_s(),
        }

    def _groups(self, streams: list[bytes]) -> tuple[int, int]:
        """Pending of the workers' group, and consumers of all groups, over all streams."""
        pending = consumers = 0
        for stream in (*streams, _KEYS.wake):
            try:
                groups: Any = self._client.xinfo_groups(stream)
            except redis.ResponseError:
                # The stream was not used yet, or was deleted when it was empty.
                continue
            for group in groups:
                consumers += group["consumers"]
                pending += 0 if group["name"] == WAKE_GROUP.encode() else group["pending"]
        return pending, consumers

    def _lag_s(self) -> float:
        """How far the feed's end is ahead of what the ledger has, by the clock of Redis."""
        return max(0.0, (_at_ms(feed_end(self._deployment)) - _at_ms(position(self._deployment))) / 1e3)

    def _postgres(self) -> dict[str, float]:
        ledger = self._deployment.ledger
        return {
            "PostgreSQL: connections": float(ledger.value(_CONNECTIONS)),
            "PostgreSQL: size, bytes": float(ledger.used_bytes()),
        }


def feed_end(deployment: Deployment) -> str:
    """The feed's last entry; nothing if it is empty."""
    entries: Any = deployment.redis.client.xrevrange(_KEYS.feed, count=1)
    return entries[0][0].decode() if entries else ""


def position(deployment: Deployment) -> str:
    """The last entry of the feed that the ledger has."""
    return str(deployment.ledger.value("SELECT position FROM feed_positions WHERE feed = 'default'") or "")


def process(pid: int) -> dict[str, float]:
    """Memory, file handles and threads of a process."""
    folder = Path(f"/proc/{pid}")
    pages = int((folder / "statm").read_text().split()[1])
    return {
        "memory, bytes": float(pages * os.sysconf("SC_PAGE_SIZE")),
        "file handles": float(len(os.listdir(folder / "fd"))),
        "threads": float(len(os.listdir(folder / "task"))),
    }


def _at_ms(entry: str) -> int:
    return int(entry.partition("-")[0] or 0)
