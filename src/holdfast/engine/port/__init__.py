"""The engine port: the only way a job moves from state to state.

Everything takes and returns batches; one batch of one queue is one atomic step (a Lua script on Redis,
a transaction on SQLite) that also appends to the feed exactly the moves it made. Time is the engine's.

What every adapter guarantees, and `holdfast.testing.contract` proves:

- An accepted job is never lost: `submit` has returned.
- A move that `core.states.MOVES` does not know changes nothing.
- A settle or renew whose lease is lost changes nothing.
- One final state and one final event per job.

All methods raise `EngineUnavailable` when the store does not answer; all may then be called again with
the same arguments: `submit` recognises its job ids, `settle` its lease tokens, the rest is repeatable.
Where queues are on several servers, a call for several queues serves those that answer, and raises if none
does; `settle` and `renew` raise `PartlyDone` if one does not.
"""

from __future__ import annotations

from typing import Any, Protocol

from holdfast.engine.port.feed import FeedPort
from holdfast.engine.port.jobs import EngineOptions, JobPort
from holdfast.engine.port.operators import OperatorPort
from holdfast.engine.port.reads import ReadPort
from holdfast.errors import EngineUnavailable
from holdfast.observe.counters import Counters


class PartialFailure(EngineUnavailable):
    """A part of the store does not answer, the rest has done its share: `done` is what the call would have returned,
    as far as that is known."""

    def __init__(self, why: EngineUnavailable, done: list[Any]) -> None:
        super().__init__(str(why))
        self.completed = done


class Engine(JobPort, OperatorPort, ReadPort, FeedPort, Protocol):
    """Decides. One instance serves one event loop; `sibling` makes another for a second thread."""

    options: EngineOptions
    counts: Counters

    async def open(self) -> None:
        """Connect and prepare the store. Raises `EngineUnavailable` at once if that fails."""
        ...

    async def close(self) -> None:
        """Give connections back. Safe to call twice."""
        ...

    def clone(self) -> Engine:
        """An engine on the same store with connections of its own, not opened yet."""
        ...
