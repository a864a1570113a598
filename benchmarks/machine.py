"""The machine: kept from dozing, calibrated with every round, described with every result.

On a virtual machine a core that halts costs two- to threefold on round trips, so the latency request is
held at 0 for all sides alike; and what neighbours do shows in the calibration.
"""

from __future__ import annotations

import os
import platform
import socket
import sqlite3
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Final

_DMA_LATENCY: Final = Path("/dev/cpu_dma_latency")
_LOOP_STEPS: Final = 500_000
_ROUND_TRIPS: Final = 2_000
_PACKAGES: Final = {
    "holdfast": "holdfast",
    "redis-py": "redis",
    "hiredis": "hiredis",
    "uvloop": "uvloop",
    "msgspec": "msgspec",
    "pydantic": "pydantic",
}


@contextmanager
def held_awake() -> Iterator[bool]:
    """Cores do not halt meanwhile; False where that cannot be asked for (not root, no such device)."""
    try:
        device = os.open(_DMA_LATENCY, os.O_WRONLY)
    except OSError:
        yield False
        return
    try:
        # In force for as long as the file is open.
        os.write(device, struct.pack("i", 0))
        yield True
    finally:
        os.close(device)


def loop_ms() -> float:
    """A fixed piece of Python: what the core is worth right now."""
    began = time.perf_counter()
    total = 0
    for step in range(_LOOP_STEPS):
        total += step & 7
    return (time.perf_counter() - began) * 1e3


def round_trip_us(port: int) -> float:
    """One PING on loopback, the mean of many: what asking a server costs right now."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.perf_counter()
        for _ in range(_ROUND_TRIPS):
            connection.sendall(b"PING\r\n")
            connection.recv(64)
        return (time.perf_counter() - began) / _ROUND_TRIPS * 1e6


def describe() -> dict[str, str]:
    """Versions and hardware, for later comparisons."""
    facts = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "SQLite": sqlite3.sqlite_version,
    }
    return facts | {name: version(package) for name, package in _PACKAGES.items()}


def filesystem(path: Path) -> str:
    """The kind of file system a path lies on; on tmpfs a sync costs nothing and proves nothing."""
    best, kind = "", "unknown"
    try:
        mounts = Path("/proc/mounts").read_text()
    except OSError:
        return kind
    for line in mounts.splitlines():
        _, mount, name, *_ = line.split()
        if path.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, name
    return kind
