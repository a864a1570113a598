"""Errors of Redis and of its connections, as the engine raises them.

An error is either the reply of a server that is not available, with advice (`EngineUnavailable`), or the refusal of a
command (`ScriptError`), or no reply at all (`Unreachable`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import hiredis

from holdfast.errors import EngineRefused, EngineUnavailable

#: Fragments of Redis errors that mean unavailable, and what to do.
_UNAVAILABLE: Final[Mapping[str, str]] = {
    "OOM ": "Redis is full (maxmemory); free memory or raise the limit. Accepted jobs are kept and still run",
    "READONLY": "this Redis is a read-only replica; connect to the master",
    "LOADING": "Redis is still loading its data; retry soon",
    "MASTERDOWN": "this replica has lost its master",
    "CLUSTERDOWN": "the Redis Cluster is down",
    "TRYAGAIN": "the Redis Cluster is moving the queue's slot; retry soon",
    "BUSY ": "Redis is busy running another script",
    "MISCONF": "Redis cannot write to its disk and refuses writes; see its log",
    "NOREPLICAS": "Redis has too few replicas to accept writes (min-replicas-to-write)",
    "NOAUTH": "Redis requires a password; put it in the URL",
    "WRONGPASS": "Redis refuses this user name or password",
    "NOPERM": "the Redis user lacks permissions for holdfast's commands or keys",
    "invalid username-password": "Redis refuses this user name or password",
    "exhausted the last possible ID": "a program has written the highest possible id to a stream of the queue; "
    "delete the stream when it is empty, it is created again",
    "max number of clients": "Redis has no room for another connection (maxclients)",
}

#: The error of a full server, which refuses submissions only: leases are renewed.
FULL: Final = "OOM "

#: The error of a script that moves jobs of a queue that was not verified in the epoch of the server.
UNVERIFIED: Final = "UNVERIFIED"
#: Errors of a server that is no longer the master.
DEMOTED: Final = ("READONLY", "MASTERDOWN")
#: Errors of a server that may no longer be the master.
DOUBTFUL: Final = ("NOREPLICAS", "LOADING")


class ScriptError(EngineRefused):
    """A command or script failed for a reason other than the health of the server."""

    @property
    def is_unverified(self) -> bool:
        """Whether the script needs a queue that was verified in this epoch."""
        return UNVERIFIED in str(self)

    @property
    def is_wrong_type(self) -> bool:
        """Whether a key has another type: another program has replaced it."""
        return "WRONGTYPE" in str(self)


class Redirected(ScriptError):
    """Another Cluster node has the slot (`MOVED`), or has the migrated key (`ASK`). Nothing was applied."""

    def __init__(self, text: str) -> None:
        super().__init__(f"this Redis is a node of a Cluster; start the URL with redis+cluster:// ({text})")
        kind, _, self.address = text.split(" ")[:3]
        self.is_ask = kind == "ASK"


class Unreachable(EngineUnavailable):
    """The server did not answer at all. Another call to it would wait as long again."""


class ConnectionLost(Unreachable):
    """The connection broke during a call. It is unknown whether the call was applied."""


def translate(exc: Exception) -> EngineUnavailable:
    """Convert a driver error."""
    text = str(exc)
    if isinstance(exc, hiredis.ReplyError):
        if text.startswith(("MOVED ", "ASK ")):
            return Redirected(text)
        for word, advice in _UNAVAILABLE.items():
            if word in text:
                return EngineUnavailable(f"{advice} (Redis says: {text})")
        return ScriptError(f"Redis refused a command: {text}")
    if isinstance(exc, TimeoutError):
        return Unreachable("Redis did not accept a connection in time; check that it runs and is reachable")
    return Unreachable(f"cannot reach Redis: {text or type(exc).__name__}; check that it runs at HOLDFAST_URL")
