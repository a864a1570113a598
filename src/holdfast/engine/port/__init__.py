"""The engine port: the only interface that moves a job from state to state.

`Engine` is composed of ports by role. Code that only reads takes `ReadPort`, `FeedReadPort` or both, `InspectionPort`.

All methods take and return batches. A batch of one queue is one atomic step: a Lua script on Redis, a transaction on
SQLite. The same step appends exactly the moves it made to the feed. Instants are read from the engine's clock.

Every adapter guarantees, and `holdfast.testing.contract` verifies:

- A job is not lost once `submit` has returned.
- A move that is not in `core.states.MOVES` changes nothing.
- A settle or renew with a lost lease changes nothing.
- A job has one final state and one final event.

All methods raise `EngineUnavailable` when the store does not answer, and can then be repeated with the same arguments:
`submit` recognises its job ids, `settle` its lease tokens, and the other methods are repeatable as they are.
If queues are on several servers, a call for several queues serves those that answer and raises if none does;
`settle` and `renew` raise `PartialFailure` if one does not.
"""

from __future__ import annotations

from typing import Any, Protocol

from holdfast.engine.port.feed import FeedPort, FeedReadPort
from holdfast.engine.port.jobs import JobPort
from holdfast.engine.port.operators import OperatorPort
from holdfast.engine.port.reads import ReadPort
from holdfast.engine.port.verification import VerificationPort
from holdfast.engine.port.worker_ids import WorkerIdPort
from holdfast.errors import EngineUnavailable


class PartialFailure(EngineUnavailable):
    """A part of the store does not answer; the call was carried out on the rest.

    `completed` is what the call would have returned, as far as that is known.
    """

    def __init__(self, cause: EngineUnavailable, completed: list[Any]) -> None:
        super().__init__(str(cause))
        self.completed = completed


class InspectionPort(ReadPort, FeedReadPort, Protocol):
    """Everything that can be read: live state, controls and the feed. Cannot change any of it."""


class OperationsPort(ReadPort, OperatorPort, Protocol):
    """What operations use: read jobs and controls, and change them for an operator."""


class Engine(JobPort, OperatorPort, ReadPort, FeedPort, VerificationPort, WorkerIdPort, Protocol):
    """Owns the live state of open jobs.

    An instance serves one event loop; use `clone` for a second one.
    """

    async def open(self) -> None:
        """Connect and prepare the store. Raises `EngineUnavailable` immediately if that fails."""
        ...

    async def close(self) -> None:
        """Close all connections. Can be called twice."""
        ...

    def clone(self) -> Engine:
        """Return an engine on the same store with its own connections. It is not open yet."""
        ...
