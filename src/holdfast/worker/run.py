"""One attempt in a worker's hands, from the claim to the engine's answer."""

from __future__ import annotations

import asyncio
from enum import Enum, auto

from holdfast.core.job import Claim
from holdfast.core.verdict import Settlement
from holdfast.observe.tracing import RunTrace
from holdfast.worker.context import Context
from holdfast.worker.plan import Plan


class Stop(Enum):
    """Why a run is ended from outside."""

    #: It had its time.
    TIMEOUT = auto()
    #: The lease is someone else's now, or the job was cancelled: whatever it returns counts for nothing.
    LOST = auto()
    #: The worker ends, and its grace time is over.
    DRAIN = auto()


class Run:
    """A claim and where it stands. Compared by identity: one worker may meet the same job twice."""

    __slots__ = (
        "began_at",
        "begun",
        "claim",
        "context",
        "ended",
        "judged",
        "plan",
        "settlement",
        "stopped",
        "task",
        "timer",
        "took_s",
        "trace",
    )

    def __init__(self, claim: Claim, plan: Plan) -> None:
        self.claim = claim
        self.plan = plan
        self.context: Context | None = None
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.settlement: Settlement | None = None
        #: When it got its slot, by `perf_counter` (0: it never did), and how long it took from there to its verdict.
        self.began_at = 0.0
        self.took_s = 0.0
        #: Its span, where runs are traced.
        self.trace: RunTrace | None = None
        #: The user's code has been called.
        self.begun = False
        self.stopped: Stop | None = None
        #: Its verdict is given, or it will get none.
        self.judged = False
        #: The user's code is out of the way; the slot is free.
        self.ended = False


#: Runs whose lease this worker holds: waiting, running, or with a verdict on its way. Changed only on the
#: worker's event loop; the renewer copies it from its own thread.
Held = set[Run]
