"""Shared state of a worker's effects: batched access to the ledger, and the effects in progress.

`EffectBatcher` turns single calls into batches: calls of one event loop that come at the same moment share a
transaction, so that a hundred concurrent effects cost about as much as a batch of a hundred. A single caller waits for
one iteration of the loop and one round trip. A call that has been made completes even if its caller is cancelled.

`EffectRuntime` exists once per event loop that runs jobs, `RunScope` once per run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from holdfast.core.job import Claim, JobInfo, JobKey
from holdfast.core.retry import Backoff
from holdfast.errors import InvalidOption, LedgerUnavailable, RunEnded
from holdfast.ledger.port.effects import EffectKey, EffectOutcome, EffectStore, Reservation, Step
from holdfast.observe.counters import Counters

A = TypeVar("A")
B = TypeVar("B")

#: Most calls in one transaction: more would delay the first ones.
MAX_BATCH: Final = 200
#: Concurrent shared calls: the next batch forms while they run.
_MAX_CALLS: Final = 2


class EffectBatcher:
    """Batched calls of a ledger's effect store. Runs on one event loop."""

    def __init__(self, effects: EffectStore) -> None:
        self._reserve = Batcher(effects.reserve)
        self._conclude = Batcher(effects.conclude)
        self._get = Batcher(effects.get)
        self._steps = Batcher(effects.steps)
        self._record = Batcher(effects.record_steps)

    async def reserve(self, reservation: Reservation) -> EffectKey:
        """Reserve a key; returns its row. If it has another token, another caller has the key."""
        return await self._reserve.put(reservation)

    async def conclude(self, outcome: EffectOutcome) -> bool:
        """Record an outcome; returns whether the token still had its key."""
        return await self._conclude.put(outcome)

    async def get(self, tenant_id: str, key: str) -> EffectKey | None:
        """The key's row."""
        return await self._get.put((tenant_id, key))

    async def steps(self, job: JobKey) -> list[Step]:
        """The job's recorded steps, by position."""
        return await self._steps.put(job)

    async def record(self, step: Step) -> Step:
        """Record a step unless its position is recorded; returns the recorded one."""
        return await self._record.put(step)


class Batcher(Generic[A, B]):
    """Batches the calls of one method."""

    def __init__(self, call: Callable[[Sequence[A]], Awaitable[list[B]]]) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[A, asyncio.Future[B]]] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._scheduled = False

    async def put(self, item: A) -> B:
        future: asyncio.Future[B] = self._loop.create_future()
        self._waiting.append((item, future))
        if not self._scheduled and len(self._calls) < _MAX_CALLS:
            self._scheduled = True
            self._loop.call_soon(self._flush)
        return await future

    def _flush(self) -> None:
        self._scheduled = False
        while self._waiting and len(self._calls) < _MAX_CALLS:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
            call = self._loop.create_task(self._send(batch))
            self._calls.add(call)
            call.add_done_callback(self._on_sent)

    def _on_sent(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._flush()

    async def _send(self, batch: list[tuple[A, asyncio.Future[B]]]) -> None:
        try:
            answers = await self._call([item for item, _ in batch])
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as exc:  # noqa: BLE001 - every caller gets it
            if len(batch) > 1 and not isinstance(exc, LedgerUnavailable):
                # One of them is the cause, and nothing was written: send each separately.
                for one in batch:
                    await self._send([one])
                return
            for _, future in batch:
                if not future.done():
                    future.set_exception(exc)
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)


_log: Final = logging.getLogger("holdfast.effects")

#: How long a cancelled run tries to record an effect's outcome: less than the grace time of a cancelled run.
FINAL_WRITE_S: Final = 3.0
#: How long to retry the release of a reservation that may exist and is not used.
_RELEASE_S: Final = 600.0


class EffectLedger(Protocol):
    """The part of a ledger that effects use."""

    @property
    def effects(self) -> EffectStore: ...


class EffectRuntime:
    """State of all effects on one event loop."""

    def __init__(
        self,
        ledger: Callable[[], Awaitable[EffectLedger | None]],
        find: Callable[[str, str], Awaitable[JobInfo | None]],
        now_ms: Callable[[], int],
        counts: Counters,
        *,
        lease_s: float,
        payload_limit: int,
    ) -> None:
        """`ledger` returns the open ledger, or None if there is none; `find` gets a job by queue and id."""
        self._ledger = ledger
        self._find = find
        self.now_ms = now_ms
        self.counts = counts
        self.payload_limit = payload_limit
        #: How long to wait for another caller's effect, and for a ledger that is unreachable between act and record.
        self.timeout_s = lease_s
        self.loop = asyncio.get_running_loop()
        #: Reservations whose effect is in progress on this loop, by token.
        self.active: dict[str, asyncio.Event] = {}
        #: Tokens of reservations that may exist and were never used: nothing has happened under them.
        self.unused: set[str] = set()
        self._store: EffectBatcher | None = None
        self._background: set[asyncio.Task[Any]] = set()

    async def store(self) -> EffectBatcher:
        """The ledger's effects. Raises `LedgerUnavailable`, or `InvalidOption` if there is no ledger."""
        if self._store is None:
            ledger = await self._ledger()
            if ledger is None:
                raise InvalidOption(
                    "effects and steps need a ledger and this app has none; set HOLDFAST_LEDGER "
                    "(postgresql://… or sqlite:///…), or use the SQLite engine, which is its own ledger"
                )
            self._store = EffectBatcher(ledger.effects)
        return self._store

    async def is_alive(self, queue: str, job_id: str, attempt: int, worker: str) -> bool:
        """Whether this attempt still has its lease."""
        view = await self._find(queue, job_id)
        return view is not None and (view.state, view.attempt, view.worker) == ("running", attempt, worker)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a background task that does not end with the run that started it."""
        task = self.loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def release_later(self, outcome: EffectOutcome) -> None:
        """Release a reservation that may exist and will not be used, as soon as the ledger answers.

        Its key is then free, or in doubt again if it was before.
        """
        if outcome.state is None:
            self.unused.add(outcome.token)
        self.spawn(self._release(outcome))

    async def _release(self, outcome: EffectOutcome) -> None:
        try:
            await self.conclude_with_retry(outcome, _RELEASE_S)
        except LedgerUnavailable:
            _log.error("ledger unreachable: key %r may stay reserved although nothing happened", outcome.key)
        else:
            self.unused.discard(outcome.token)

    async def conclude_with_retry(self, outcome: EffectOutcome, timeout_s: float) -> bool:
        """Record an outcome, retrying until the timeout."""
        deadline = self.loop.time() + timeout_s
        backoff: Backoff | None = None
        while True:
            try:
                return await (await self.store()).conclude(outcome)
            except LedgerUnavailable:
                backoff = backoff or Backoff()
                pause_s = backoff.next_s()
                if self.loop.time() + pause_s >= deadline:
                    raise
                await asyncio.sleep(pause_s)


class RunScope:
    """State of one run that its effects and steps share."""

    __slots__ = ("claim", "ended", "in_doubt", "tools")

    def __init__(self, claim: Claim, tools: EffectRuntime) -> None:
        self.claim = claim
        self.tools = tools
        #: Whether the run was ended from outside. A thread, or a task that swallows its cancellation, may still run.
        self.ended = False
        #: Effects that an operator has to decide about: in progress, or in doubt. By key, with the reason.
        self.in_doubt: dict[str, str] = {}

    def check(self, what: str) -> None:
        """Raise `RunEnded` if the run has ended: another run may be in progress."""
        if self.ended:
            raise RunEnded(self.claim.job_id, what)
