"""Names of processes in stores and logs: `NAME@HOST-PID-TOKEN`, or without a name `HOST-PID-TOKEN`.

The token is the start time in seconds and 32 random bits, both in hexadecimal.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Final

from holdfast.errors import InvalidOption

_RANDOM_BYTES: Final = 4
_WORKER_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_TOKEN: Final = re.compile(r"(?P<started_s>[0-9a-f]{8})[0-9a-f]{8}")
_PID: Final = re.compile(r"[0-9]{1,10}")


def check_worker_id(worker_id: object) -> str:
    """Check the stable identity of a worker. Raises `InvalidOption`."""
    if not isinstance(worker_id, str) or not _WORKER_ID.fullmatch(worker_id):
        raise InvalidOption(
            f"worker id {worker_id!r} is not usable; give each worker a different one of 1 to 128 characters from "
            "A-Z, a-z, 0-9, _ . : -"
        )
    return worker_id


@dataclass(frozen=True, slots=True)
class Identity:
    """The parts of a process's name."""

    name: str
    host: str
    pid: int
    started_at_ms: int


def new_identity(name: str = "") -> str:
    """A name that is unique to this start of this process.

    Create it when the work starts, never at import: a fork would copy it.
    """
    token = f"{int(time.time()) & 0xFFFFFFFF:08x}{secrets.token_hex(_RANDOM_BYTES)}"
    process = f"{socket.gethostname()}-{os.getpid()}-{token}"
    return f"{name}@{process}" if name else process


def parse_identity(identity: str) -> Identity | None:
    """The parts of a name that `new_identity` made; None for any other name."""
    head, _, token = identity.rpartition("-")
    head, _, pid = head.rpartition("-")
    name, _, host = head.rpartition("@")
    started = _TOKEN.fullmatch(token)
    if started is None or not _PID.fullmatch(pid) or not host:
        return None
    return Identity(name, host, int(pid), int(started["started_s"], 16) * 1000)
