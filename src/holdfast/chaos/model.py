"""The words of a chaos run: what is done to whom, and what came of it."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Kind(StrEnum):
    """What can happen to a part of a deployment."""

    KILL = "kill"
    """kill -9, and started again."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after a while: longer than a lease, sometimes."""
    RESTART = "restart"
    """Ended as an operator would, and started again."""
    CUT = "cut"
    """All connections to it are cut, once."""
    SLOW = "slow"
    """Every reply is held back for a while."""
    STALL = "stall"
    """Connections stay open, nothing passes."""
    LOSE_REPLY = "lose-reply"
    """It does what it was asked to; the reply is lost and the connection cut."""
    FILL = "fill"
    """The disk under its data is full."""
    FAIL_OVER = "fail-over"
    """A master dies by kill -9, and its replica takes its place (Sentinel, Cluster)."""
    HAND_OVER = "hand-over"
    """A master is asked to leave its place to its replica (Sentinel, Cluster)."""


class Fault(msgspec.Struct, frozen=True):
    """One fault, as planned. `at`: the share of all jobs that are accepted when it strikes (0 to 1)."""

    number: int
    at: float
    kind: Kind
    #: The name of a part: `worker-1`, `upkeep-1`, `server-1`, `redis` (`redis-2` …), `postgres`.
    target: str
    #: How long it lasts, for those that last.
    seconds: float = 0.0


class Struck(msgspec.Struct, frozen=True):
    """One fault, as it was."""

    fault: Fault
    #: Jobs that were accepted when it struck.
    accepted: int
    #: From when until when, by the clock; until the servers that it struck were joined again.
    began_at: float = 0.0
    over_at: float = 0.0
    #: From the moment that it, and what struck together with it, was over until a job submitted then had ended; -1 if
    #: it had not within the patience.
    recovered_s: float = -1.0
    #: Why it could not be done here; empty if it was.
    skipped: str = ""
