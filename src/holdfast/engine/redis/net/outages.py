"""Queues whose node is away: on a Cluster, its outage touches its own queues only (decision 0018).

Such a queue is passed over by every call that has other queues to serve, so that none of them waits for a node which
does not answer. Whether it is back is asked beside the calls, later each time, and only while somebody wants to know.
What a lost reply had granted is in doubt until `resume` has looked.

On a single server there is nothing to pass over: every failure is the caller's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

from holdfast.core.retry import Backoff
from holdfast.engine.redis.net.client import Unreachable
from holdfast.errors import EngineRefused, EngineUnavailable

_log: Final = logging.getLogger("holdfast.engine.redis")

_T = TypeVar("_T")


class _Outage:
    def __init__(self, failure: EngineUnavailable) -> None:
        self.failure = failure
        self.backoff = Backoff()
        #: Not to be asked before.
        self.until = 0.0
        self.asking: asyncio.Task[None] | None = None
        #: Its node answers questions; whether it does what it is told is to be seen.
        self.answers = False


class Outages:
    """Which queues do not answer. `ask` is a cheap question to a queue's node, `place` tells one node from another."""

    def __init__(self, ask: Callable[[str], Awaitable[object]], place: Callable[[str], object], *, apart: bool) -> None:
        self._ask = ask
        self._place = place
        #: Whether queues can be away one by one.
        self.apart = apart
        self._away: dict[str, _Outage] = {}
        self._in_doubt: set[str] = set()
        #: What the log has been told, by this engine or its siblings.
        self.told: set[str] = set()

    def is_skipped(self, queue: str) -> bool:
        """Whether it is not to be asked now. Sees to it that somebody finds out when it is."""
        outage = self._away.get(queue)
        if outage is None or outage.answers:
            return False
        if outage.asking is None and time.monotonic() >= outage.until:
            outage.asking = asyncio.create_task(self._find_out(queue, outage))
        return True

    def may_have_lost_reply(self, queue: str) -> bool:
        """Whether a reply may have been lost that granted something."""
        return queue in self._in_doubt

    def confirm(self, queue: str) -> None:
        """Everything that it grants to us is known."""
        self._in_doubt.discard(queue)

    async def for_each(self, queues: Iterable[str], step: Callable[[str], Awaitable[_T | None]]) -> dict[str, _T]:
        """A step for each queue, in order; a step that is not taken returns None.

        On a Cluster those that are away are left out. If all that were asked are, the failure is raised.
        """
        asked = list(queues)
        if self.apart:
            asked = [queue for queue in asked if not self.is_skipped(queue)] or asked
        done: dict[str, _T] = {}
        failure: EngineUnavailable | None = None
        #: Nodes that do not answer at all. (Else it may be one queue's own trouble: its slot is being moved.)
        gone: dict[object, EngineUnavailable] = {}
        for queue in asked:
            if gone and (known := gone.get(self._place(queue))) is not None:
                # Its neighbour has waited for that node already.
                self._began(queue, known)
                continue
            try:
                result = await step(queue)
            except EngineUnavailable as exc:
                if not self.apart or isinstance(exc, EngineRefused):
                    raise
                failure = exc
                if isinstance(exc, Unreachable):
                    gone[self._place(queue)] = exc
                self._in_doubt.add(queue)
                self._began(queue, exc)
            else:
                if result is not None:
                    done[queue] = result
                    self._is_well(queue)
        if failure is not None and not done:
            raise failure
        return done

    def first_error(self, queues: Iterable[str]) -> EngineUnavailable:
        """What the first of these that is away said last."""
        failures = (self._away[queue].failure for queue in queues if queue in self._away)
        return next(failures, EngineUnavailable("a node of the Redis Cluster does not answer; try again"))

    def close(self) -> None:
        """Ask no more."""
        for outage in self._away.values():
            if outage.asking is not None:
                outage.asking.cancel()
        self._away.clear()

    def log_once(self, queue: str, failure: EngineUnavailable) -> None:
        """Log it, once in an outage."""
        if queue not in self.told:
            self.told.add(queue)
            _log.warning("queue %s is away, others go on: %s", queue, failure)

    def _began(self, queue: str, failure: EngineUnavailable) -> None:
        outage = self._away.get(queue)
        if outage is None:
            outage = self._away[queue] = _Outage(failure)
            self.log_once(queue, failure)
        outage.failure, outage.answers = failure, False
        outage.until = time.monotonic() + outage.backoff.next_s()

    def _is_well(self, queue: str) -> None:
        if self._away and self._away.pop(queue, None) is not None and queue in self.told:
            self.told.discard(queue)
            _log.warning("queue %s answers again", queue)

    async def _find_out(self, queue: str, outage: _Outage) -> None:
        try:
            await self._ask(queue)
            outage.answers = True
        except EngineUnavailable as exc:
            _log.debug("queue %s is still away: %s", queue, exc)
            outage.until = time.monotonic() + outage.backoff.next_s()
        finally:
            outage.asking = None
