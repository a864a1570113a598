"""Consume a broker queue and start a run for each message (T4, T5).

    adapter ──► queue (order per key) ──► workers: handle ──► runtime
                  ▲                          │ retry, outage
                  └────────── waiting ◄──────┘

One consumer fills the queue, `concurrency` workers empty it. A message that waits for a retry or for the end of an
outage occupies no worker and blocks only its own key. At most `prefetch` messages are in flight.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Self

from holdfast.aio import is_own_cancellation
from holdfast.brokers.port import QueueAdapter
from holdfast.clock import Clock, SystemClock
from holdfast.core.codec import PAYLOAD_LIMIT
from holdfast.errors import InvalidOption, UsageError
from holdfast.triggers.activity_log import Activity
from holdfast.triggers.config import QueueTriggerConfig
from holdfast.triggers.dedup import IdempotencyStore
from holdfast.triggers.execution_log import ExecutionLog
from holdfast.triggers.message_handler import MessageHandler
from holdfast.triggers.receiver import KeyedQueue, OutageHold, Receiver
from holdfast.triggers.runtime import CallGuard, Runtime, adapt_runtime
from holdfast.triggers.state import InFlightMessage, Next, OnHold, RetryAfter, TriggerCounters
from holdfast.triggers.state import TriggerHealth as TriggerHealth
from holdfast.triggers.state import TriggerState as TriggerState

if TYPE_CHECKING:
    from holdfast.guard.runner import GuardRunner
    from holdfast.ledger.port.messages import TriggerStore


_log: Final = logging.getLogger("holdfast.triggers")

_STOP_S: Final = 30.0
#: Minimum time for the last records, even if the stop timeout is used up.
_LAST_RECORDS_S: Final = 2.0
_HEALTH_S: Final = 5.0
#: Number of message ids in the log of unfinished messages.
_LOGGED_IDS: Final = 10
_PAUSED: Final = "paused"


class QueueTrigger:
    """Trigger of one queue. Use it in one event loop and start it once; after `stop` create another."""

    def __init__(
        self,
        config: QueueTriggerConfig,
        adapter: QueueAdapter,
        runtime: Runtime,
        *,
        guards: GuardRunner | None = None,
        book: TriggerStore | None = None,
        dedup: IdempotencyStore | None = None,
        counts: TriggerCounters | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        payload_limit: int = PAYLOAD_LIMIT,
    ) -> None:
        """`guards` and `dedup` are for runtimes that do not submit jobs; an app's submitter has its own.

        `book` stores execution records. `sleep` waits for retries and outages. With a `clock`, durations are measured
        by that clock.
        """
        self.config = config
        self.counts = counts or TriggerCounters(config.queue_name)
        self._adapter = adapter
        self._sleep = sleep
        self._book = book
        self._state = TriggerState.NEW
        self._paused = False
        self._adapter_paused = False
        self._pausing = asyncio.Lock()
        self._stopping = asyncio.Lock()
        self._queue: KeyedQueue[InFlightMessage] = KeyedQueue(config.prefetch)
        self._holding = OutageHold(config.name, self._queue, sleep, self._on_holding)
        self._records: ExecutionLog | None = None
        self._dedup = dedup
        measured: Clock = clock or SystemClock()
        self._activity = Activity(config, self.counts)
        self._receiver = Receiver(config, adapter, self._queue, self.counts, self._activity, measured, sleep)
        act, submits_jobs = adapt_runtime(runtime)
        if config.enable_dedup and not submits_jobs and dedup is None:
            raise InvalidOption(
                f"trigger {config.name}: the runtime does not detect duplicates and there is no dedup store; pass "
                "dedup=LedgerIdempotencyStore(…), or set enable_dedup to false"
            )
        guard = None if guards is None or submits_jobs else CallGuard(guards, config.queue_name, payload_limit)
        self._handler = MessageHandler(
            config,
            adapter,
            act,
            check=guard.check if guard is not None else None,
            dedup=None if submits_jobs else dedup,
            counts=self.counts,
            record=self._record if book is not None else None,
            record_now=self._record_now if book is not None else None,
            clock=measured,
            monotonic=time.monotonic if clock is None else lambda: measured.now_ms() / 1000,
            payload_limit=payload_limit,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._workers: list[asyncio.Task[None]] = []
        #: Messages being handled, and those waiting for a retry.
        self._busy: set[InFlightMessage] = set()
        self._waits: dict[InFlightMessage, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._unfinished: list[InFlightMessage] = []

    # Life cycle --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect, then consume. Raises if the first connection fails, and closes the adapter."""
        if self._state is not TriggerState.NEW:
            raise UsageError(f"trigger {self.config.name} is {self._state.value}; create a new one to start it again")
        self._state = TriggerState.RUNNING
        try:
            await self._adapter.connect()
        except BaseException:
            self._state = TriggerState.STOPPED
            await self._adapter.close()
            raise
        if self._has_stopped():
            await self._adapter.close()
            raise UsageError(f"trigger {self.config.name} was stopped while starting")
        if self._book is not None:
            self._records = ExecutionLog(self._book, self.counts)
        create = asyncio.create_task
        self._receiver.feeding = True
        self._tasks = [
            create(self._receiver.run(), name="holdfast-trigger-feed"),
            create(self._activity.run(), name="holdfast-trigger-activity"),
        ]
        if self.config.metrics.enabled:
            self._tasks.append(create(self._receiver.watch(), name="holdfast-trigger-watch"))
        self.counts.active_workers = self.config.concurrency
        self._workers = [create(self._work(), name="holdfast-trigger-work") for _ in range(self.config.concurrency)]
        _log.debug(
            "trigger %s started, %d workers", self.config.name, self.config.concurrency, extra=self._log_fields()
        )

    async def pause(self) -> None:
        """Handle no further messages until `resume`. Can be repeated.

        Messages being handled are finished, and the consumer stays a member of its group.
        """
        self._require_running("pause")
        if not self._paused:
            self._paused = True
            self._queue.block(_PAUSED)
            _log.info("trigger %s paused", self.config.name, extra=self._log_fields())
        await self._pause_adapter()

    async def resume(self) -> None:
        """Continue after `pause`. Can be repeated."""
        self._require_running("resume")
        if self._paused:
            self._paused = False
            self._queue.unblock(_PAUSED)
            _log.info("trigger %s resumed", self.config.name, extra=self._log_fields())
        await self._pause_adapter()

    async def stop(self, timeout_s: float = _STOP_S) -> None:
        """Drain: receive nothing more, finish messages being handled, return the rest to the broker.

        Can be repeated. Messages that wait for a retry or for the end of an outage are returned immediately.
        """
        async with self._stopping:
            if self._state is TriggerState.STOPPED:
                return
            started = self._state is not TriggerState.NEW
            self._state = TriggerState.STOPPING
            deadline = asyncio.get_running_loop().time() + timeout_s
            try:
                if started:
                    await self._wind_down(timeout_s)
                    await self._close_records(deadline)
            finally:
                self._state = TriggerState.STOPPED
                self._receiver.feeding = False
                await self._adapter.close()
        if started:
            self._activity.summarize()
            self._log_unfinished()

    def stop_now(self) -> None:
        """During `stop`: do not wait for messages being handled; they are delivered again."""
        if self._state is TriggerState.STOPPING:
            for worker in self._workers:
                worker.cancel()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # State -------------------------------------------------------------------------------------------

    @property
    def state(self) -> TriggerState:
        if self._state is TriggerState.RUNNING:
            if self._holding:
                return TriggerState.HOLDING
            if self._paused:
                return TriggerState.PAUSED
        return self._state

    @property
    def ready(self) -> bool:
        """Whether it consumes and its runtime is available. A trigger paused by an operator is ready."""
        return self._receiver.feeding and self.state in (TriggerState.RUNNING, TriggerState.PAUSED)

    @property
    def in_flight(self) -> int:
        """Number of messages that are neither acknowledged nor refused."""
        return self._queue.size

    async def health(self) -> TriggerHealth:
        """Current health; queries the broker."""
        running = self._state is TriggerState.RUNNING
        adapter_healthy = running and await self._check_adapter()
        state = self.state
        if not running:
            status = "stopped"
        elif not adapter_healthy or not self._receiver.feeding:
            status = "unhealthy"
        else:
            status = "healthy" if state is TriggerState.RUNNING else state.value
        return TriggerHealth(
            status=status,
            running=running,
            adapter_healthy=adapter_healthy,
            active_workers=self.counts.active_workers,
            paused=self._paused,
        )

    # Work --------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        try:
            while (item := await self._queue.next_item()) is not None:
                self._busy.add(item)
                self._apply(item, await self._handle(item))
                self._busy.discard(item)
        finally:
            self.counts.active_workers -= 1

    async def _handle(self, item: InFlightMessage) -> Next:
        try:
            return await self._handler.handle(item)
        except (Exception, asyncio.CancelledError) as exc:
            if is_own_cancellation(exc):
                raise
            # A defect here, or a client that cancels its calls, must not lose the message or end the worker.
            _log.exception(
                "message %s: handling failed unexpectedly, retrying", item.raw.message_id, extra=self._log_fields(item)
            )
            return RetryAfter(1.0)

    def _apply(self, item: InFlightMessage, next_step: Next) -> None:
        if next_step == "off":
            self._queue.done(item)
            self._activity.end()
            self.counts.in_flight = self._queue.size
        elif self._state is not TriggerState.RUNNING:
            self._unfinished.append(item)
            return
        elif isinstance(next_step, OnHold):
            self._holding.add(item, next_step.reason)
            self.counts.held = len(self._holding)
            return
        else:
            self._waits[item] = asyncio.create_task(self._wait(item, next_step.delay_s))
        if self._holding:
            self._holding.release(item)
            self.counts.held = len(self._holding)

    async def _wait(self, item: InFlightMessage, delay_s: float) -> None:
        await self._sleep(delay_s)
        del self._waits[item]
        self._queue.requeue(item)

    def _record(self, execution: Any) -> None:
        assert self._records is not None
        self._records.put(execution)

    async def _record_now(self, execution: Any) -> None:
        assert self._records is not None
        await self._records.write(execution)

    # Pausing -----------------------------------------------------------------------------------------

    def _on_holding(self) -> None:
        if self._state is TriggerState.RUNNING:
            task = asyncio.create_task(self._try_to_pause_adapter())
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _pause_adapter(self) -> None:
        """Pause or resume the adapter to match the current state. Calls are serialised."""
        async with self._pausing:
            paused = self._paused or bool(self._holding)
            if paused == self._adapter_paused or self._state is not TriggerState.RUNNING:
                return
            await (self._adapter.pause() if paused else self._adapter.resume())
            self._adapter_paused = paused

    async def _try_to_pause_adapter(self) -> None:
        try:
            await self._pause_adapter()
        except Exception as exc:  # noqa: BLE001 - the queue is blocked anyway; this only avoids prefetching
            _log.warning("trigger %s: adapter not paused: %s", self.config.name, type(exc).__name__)

    # Ending ------------------------------------------------------------------------------------------

    async def _wind_down(self, timeout_s: float) -> None:
        self._queue.close()
        await _cancel(self._tasks)
        waits = list(self._waits)
        await _cancel(list(self._waits.values()))
        self._unfinished += [*waits, *await self._holding.stop()]
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=timeout_s)
            await _cancel(list(late))
        self._unfinished += [item for item in self._queue.ready() if item.started_at_ms]
        await asyncio.gather(*(self._handler.abandon(item) for item in self._unfinished))
        # Unknown whether these have run: their keys stay reserved for a lease.
        self._unfinished += self._busy
        await _cancel(list(self._background))
        if self._dedup is not None:
            await self._dedup.close()

    async def _close_records(self, deadline: float) -> None:
        if self._records is not None:
            await self._records.close(max(_LAST_RECORDS_S, deadline - asyncio.get_running_loop().time()))

    def _log_unfinished(self) -> None:
        untouched = self._queue.size - len(self._unfinished)
        if self._unfinished:
            some = ", ".join(item.raw.message_id for item in self._unfinished[:_LOGGED_IDS])
            _log.warning(
                "trigger %s stopped with %d unfinished messages (%s%s) and %d not started; they will be redelivered",
                self.config.name,
                len(self._unfinished),
                some,
                ", …" if len(self._unfinished) > _LOGGED_IDS else "",
                untouched,
                extra=self._log_fields(),
            )
        else:
            _log.info("trigger %s stopped, %d messages returned", self.config.name, untouched, extra=self._log_fields())

    # Helpers -----------------------------------------------------------------------------------------

    async def _check_adapter(self) -> bool:
        try:
            async with asyncio.timeout(_HEALTH_S):
                return await self._adapter.health_check()
        except Exception as exc:  # noqa: BLE001 - any error means unhealthy
            _log.debug("trigger %s: the broker does not answer: %s", self.config.name, type(exc).__name__)
            return False

    def _has_stopped(self) -> bool:
        return self._state is not TriggerState.RUNNING

    def _require_running(self, what: str) -> None:
        if self._state is not TriggerState.RUNNING:
            raise UsageError(f"cannot {what} trigger {self.config.name}: it is {self._state.value}")

    def _log_fields(self, item: InFlightMessage | None = None) -> dict[str, Any]:
        about = {"trigger": self.config.name, "queue": self.config.queue_name}
        return about if item is None else {**about, "message_id": item.raw.message_id, "trace_id": item.trace_id}

    def __repr__(self) -> str:
        return f"<QueueTrigger {self.config.name!r}, {self.state.value}>"


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
