"""Queues on unreachable nodes: a node's outage affects only its own queues (decision 0018).

Calls that serve several queues skip such a queue, so that no other queue waits for a node that does not answer. A step
on a node that becomes silent is abandoned, if queues of other nodes are to be served (decision 0041). The node is
probed in the background, with backoff, and only while calls name the queue. Leases granted in a lost reply are in doubt
until the queue's claims are recovered (`confirm`).

On a single server nothing is skipped: every failure is raised.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Final, TypeVar

from holdfast.core.retry import Backoff
from holdfast.engine.redis.net.client import RedisClient
from holdfast.engine.redis.net.errors import ConnectionLost, Unreachable
from holdfast.errors import EngineRefused, EngineUnavailable, QueueUnverified

_log: Final = logging.getLogger("holdfast.engine.redis")

_T = TypeVar("_T")


class _Outage:
    def __init__(self, failure: EngineUnavailable) -> None:
        self.failure = failure
        self.backoff = Backoff()
        #: Not probed before this time.
        self.until = 0.0
        self.probing: asyncio.Task[None] | None = None
        #: The node answered a probe; the next call shows whether it works.
        self.answers = False


class Outages:
    """Unreachable queues. `probe` is a cheap call to the node of a queue, `node_of` identifies that node."""

    def __init__(
        self, probe: Callable[[str], Awaitable[object]], node_of: Callable[[str], RedisClient | None], *, apart: bool
    ) -> None:
        self._probe = probe
        self._node_of = node_of
        #: Whether queues can be unreachable one by one (Cluster).
        self.apart = apart
        self._outages: dict[str, _Outage] = {}
        self._in_doubt: set[str] = set()
        #: Queues whose outage was logged, by this engine or its siblings.
        self.logged: set[str] = set()

    def is_skipped(self, queue: str) -> bool:
        """Whether to skip the queue now. Starts a probe when one is due."""
        outage = self._outages.get(queue)
        if outage is None or outage.answers:
            return False
        if outage.probing is None and time.monotonic() >= outage.until:
            outage.probing = asyncio.create_task(self._probe_queue(queue, outage))
        return True

    def may_have_lost_reply(self, queue: str) -> bool:
        """Whether a lost reply may have granted leases."""
        return queue in self._in_doubt

    def confirm(self, queue: str) -> None:
        """Record that all leases granted by this queue are known."""
        self._in_doubt.discard(queue)

    async def for_each(
        self,
        queues: Iterable[str],
        step: Callable[[str], Awaitable[_T | None]],
        together: int = 1,
        *,
        waits: bool = True,
    ) -> dict[str, _T]:
        """Run a step for each queue, in order. A step that did nothing returns None.

        A queue that is not verified, or that the store refuses to serve (another program has replaced one of its keys),
        does not affect the others; nor does, on a Cluster, one that is unreachable. The latter are skipped for a while.
        If all called queues fail, the failure is raised. On one server, up to `together` steps run at a time.

        A step on a silent node is abandoned if queues of other nodes are to be served, and always without `waits`.
        """
        called = list(queues)
        if self._outages:
            called = [queue for queue in called if not self.is_skipped(queue)] or called
        if together > 1 and not self.apart:
            return await self._run_together(called, step, together)
        if waits and self.apart:
            # A silent node is waited for only if no other node has queues to serve.
            waits = len({self._node_of(queue) for queue in called}) == 1
        done: dict[str, _T] = {}
        failure: EngineUnavailable | None = None
        #: Nodes that do not answer at all. Other failures may concern one queue, whose slot is being moved.
        unreachable: dict[object, EngineUnavailable] = {}
        for queue in called:
            if unreachable and (known := unreachable.get(self._node_of(queue))) is not None:
                # Another queue has already waited for that node.
                self._began(queue, known)
                continue
            try:
                node = None if waits or not self.apart else self._node_of(queue)
                if node is None:
                    result = await step(queue)
                else:
                    result = await node.run_unless_silent(partial(step, queue))
            except QueueUnverified as exc:
                failure = exc
                self._in_doubt.add(queue)
            except EngineUnavailable as exc:
                if not self.apart and not isinstance(exc, EngineRefused):
                    raise
                failure = exc
                if isinstance(exc, Unreachable):
                    unreachable[self._node_of(queue)] = exc
                self._in_doubt.add(queue)
                self._began(queue, exc)
            else:
                if result is not None:
                    done[queue] = result
                    self._on_recovery(queue)
        if failure is not None and not done:
            raise failure
        return done

    async def _run_together(
        self, queues: Sequence[str], step: Callable[[str], Awaitable[_T | None]], together: int
    ) -> dict[str, _T]:
        done: dict[str, _T] = {}
        failure: EngineRefused | QueueUnverified | None = None
        for start in range(0, len(queues), together):
            part = queues[start : start + together]
            results = await asyncio.gather(*map(step, part), return_exceptions=True)
            for queue, result in zip(part, results, strict=True):
                if isinstance(result, EngineRefused):
                    failure = result
                    self._in_doubt.add(queue)
                    self._began(queue, result)
                elif isinstance(result, QueueUnverified):
                    failure = result
                elif isinstance(result, BaseException):
                    raise result
                elif result is not None:
                    done[queue] = result
                    self._on_recovery(queue)
        if failure is not None and not done:
            raise failure
        return done

    def first_error(self, queues: Iterable[str]) -> EngineUnavailable:
        """The last failure of the first unreachable queue."""
        failures = (self._outages[queue].failure for queue in queues if queue in self._outages)
        return next(failures, EngineUnavailable("a node of the Redis Cluster does not answer; retry"))

    def close(self) -> None:
        """Cancel all probes."""
        for outage in self._outages.values():
            if outage.probing is not None:
                outage.probing.cancel()
        self._outages.clear()

    def log_once(self, queue: str, failure: EngineUnavailable) -> None:
        """Log an outage once."""
        if queue not in self.logged:
            self.logged.add(queue)
            _log.warning("queue %s unreachable, other queues continue: %s", queue, failure)

    def _began(self, queue: str, failure: EngineUnavailable) -> None:
        outage = self._outages.get(queue)
        if outage is None:
            outage = self._outages[queue] = _Outage(failure)
            self.log_once(queue, failure)
        outage.failure, outage.answers = failure, False
        outage.until = time.monotonic() + outage.backoff.next_s()

    def _on_recovery(self, queue: str) -> None:
        if self._outages and self._outages.pop(queue, None) is not None and queue in self.logged:
            self.logged.discard(queue)
            _log.warning("queue %s recovered", queue)

    async def _probe_queue(self, queue: str, outage: _Outage) -> None:
        try:
            try:
                await self._probe(queue)
            except ConnectionLost:
                # Another node may have taken over.
                await self._probe(queue)
            outage.answers = True
        except EngineUnavailable as exc:
            _log.debug("queue %s still unreachable: %s", queue, exc)
            outage.until = time.monotonic() + outage.backoff.next_s()
        finally:
            outage.probing = None
