"""A queue's messages become runs (requirements T4, T5).

    adapter ──► lines (order per key) ──► workers: handle ──► runtime
                  ▲                          │ retry, outage
                  └────────── waiting ◄──────┘

One consumer feeds the lines, `concurrency` workers empty them. What waits, for a retry or for the end of an outage, is
in no worker's hands and keeps up only its own key. At most `prefetch` messages are in hand in all.
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
from holdfast.triggers.config import TriggerConfig
from holdfast.triggers.consumer import Consumer, KeyedQueue, OutageHold
from holdfast.triggers.dedup import DedupStore
from holdfast.triggers.execution_log import ExecutionLog
from holdfast.triggers.handler import Handler
from holdfast.triggers.runtime import CallGuard, Runtime, adapt_runtime
from holdfast.triggers.state import InFlightMessage, Next, OnHold, RetryAfter, TriggerCounters
from holdfast.triggers.state import TriggerHealth as TriggerHealth
from holdfast.triggers.state import TriggerState as TriggerState

if TYPE_CHECKING:
    from holdfast.guard.runner import GuardRunner
    from holdfast.ledger.port.messages import TriggerStore


_log: Final = logging.getLogger("holdfast.trigger")

_STOP_S: Final = 30.0
#: For the last records, even if nothing is left of the time to stop.
_LAST_RECORDS_S: Final = 2.0
_HEALTH_S: Final = 5.0
#: Of messages that are named when a trigger leaves them.
_NAMED: Final = 10
_PAUSED: Final = "paused"


class QueueTrigger:
    """Consumes one queue. One event loop; started once: after `stop` make another one."""

    def __init__(
        self,
        config: TriggerConfig,
        adapter: QueueAdapter,
        runtime: Runtime,
        *,
        gate: GuardRunner | None = None,
        book: TriggerStore | None = None,
        dedup: DedupStore | None = None,
        counts: TriggerCounters | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        payload_limit: int = PAYLOAD_LIMIT,
    ) -> None:
        """`gate` and `dedup` are for runtimes that do not submit to an app's desk, which has its own. `book`: where
        records go. `sleep` waits for retries and outages; with a `clock`, durations are by that clock, too."""
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
        self._lines: KeyedQueue[InFlightMessage] = KeyedQueue(config.prefetch)
        self._holding = OutageHold(config.name, self._lines, sleep, self._on_holding)
        self._records: ExecutionLog | None = None
        self._dedup = dedup
        measured: Clock = clock or SystemClock()
        self._activity = Activity(config, self.counts)
        self._feeder = Consumer(config, adapter, self._lines, self.counts, self._activity, measured, sleep)
        act, submits_jobs = adapt_runtime(runtime)
        if config.enable_dedup and not submits_jobs and dedup is None:
            raise InvalidOption(
                f"trigger {config.name}: its runtime knows no duplicates, so it needs a store of keys: give "
                "dedup=LedgerDedup(…), or set enable_dedup to false"
            )
        keeper = None if gate is None or submits_jobs else CallGuard(gate, config.queue_name, payload_limit)
        self._handler = Handler(
            config,
            adapter,
            act,
            ask=keeper.check if keeper is not None else None,
            dedup=None if submits_jobs else dedup,
            counts=self.counts,
            record=self._record if book is not None else None,
            clock=measured,
            monotonic=time.monotonic if clock is None else lambda: measured.now_ms() / 1000,
            payload_limit=payload_limit,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._workers: list[asyncio.Task[None]] = []
        #: In a worker's hands, and waiting for a retry.
        self._busy: set[InFlightMessage] = set()
        self._waits: dict[InFlightMessage, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._left: list[InFlightMessage] = []

    # Life --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect, then consume. A first connection that fails raises at once, and nothing is left behind."""
        if self._state is not TriggerState.NEW:
            raise UsageError(f"trigger {self.config.name} is {self._state.value}: a trigger is started once")
        self._state = TriggerState.RUNNING
        try:
            await self._adapter.connect()
        except BaseException:
            self._state = TriggerState.STOPPED
            await self._adapter.close()
            raise
        if self._has_stopped():
            await self._adapter.close()
            raise UsageError(f"trigger {self.config.name} was stopped before it had started")
        if self._book is not None:
            self._records = ExecutionLog(self._book, self.counts)
        create = asyncio.create_task
        self._feeder.feeding = True
        self._tasks = [
            create(self._feeder.run(), name="holdfast-trigger-feed"),
            create(self._activity.run(), name="holdfast-trigger-activity"),
        ]
        if self.config.metrics.enabled:
            self._tasks.append(create(self._feeder.watch(), name="holdfast-trigger-watch"))
        self.counts.active_workers = self.config.concurrency
        self._workers = [create(self._work(), name="holdfast-trigger-work") for _ in range(self.config.concurrency)]
        _log.debug("trigger %s started, %d workers", self.config.name, self.config.concurrency, extra=self._about())

    async def pause(self) -> None:
        """Hand nothing over until `resume`; what is being handed over is finished, and the consumer stays a member of
        its group. Twice is the same as once."""
        self._must_run("pause")
        if not self._paused:
            self._paused = True
            self._lines.block(_PAUSED)
            _log.info("trigger %s paused", self.config.name, extra=self._about())
        await self._pause_adapter()

    async def resume(self) -> None:
        """Go on."""
        self._must_run("resume")
        if self._paused:
            self._paused = False
            self._lines.unblock(_PAUSED)
            _log.info("trigger %s resumed", self.config.name, extra=self._about())
        await self._pause_adapter()

    async def stop(self, timeout_s: float = _STOP_S) -> None:
        """Take no more, wait for what is being handed over, and give back the rest: others get it. Safe to call twice.

        What waits for a retry or for an outage to end is not waited for: it is given back at once.
        """
        async with self._stopping:
            if self._state is TriggerState.STOPPED:
                return
            started = self._state is not TriggerState.NEW
            self._state = TriggerState.STOPPING
            give_up_at = asyncio.get_running_loop().time() + timeout_s
            try:
                if started:
                    await self._wind_down(timeout_s)
                    await self._close_records(give_up_at)
            finally:
                self._state = TriggerState.STOPPED
                self._feeder.feeding = False
                await self._adapter.close()
        if started:
            self._activity.summarize()
            self._tell_what_was_left()

    def stop_now(self) -> None:
        """While it stops: do not wait for what is being handed over; it is delivered again."""
        if self._state is TriggerState.STOPPING:
            for worker in self._workers:
                worker.cancel()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # Questions ---------------------------------------------------------------------------------------

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
        """Whether it consumes, and what it hands over is taken; a trigger that people have paused is ready."""
        return self._feeder.feeding and self.state in (TriggerState.RUNNING, TriggerState.PAUSED)

    @property
    def in_flight(self) -> int:
        """Messages that are neither acknowledged nor refused."""
        return self._lines.size

    async def health(self) -> TriggerHealth:
        """The truth, now: the broker is asked."""
        running = self._state is TriggerState.RUNNING
        adapter_healthy = running and await self._ask_adapter()
        state = self.state
        if not running:
            status = "stopped"
        elif not adapter_healthy or not self._feeder.feeding:
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
            while (item := await self._lines.take()) is not None:
                self._busy.add(item)
                self._go_on(item, await self._look_at(item))
                self._busy.discard(item)
        finally:
            self.counts.active_workers -= 1

    async def _look_at(self, item: InFlightMessage) -> Next:
        try:
            return await self._handler.handle(item)
        except (Exception, asyncio.CancelledError) as exc:
            if is_own_cancellation(exc):
                raise
            # A mistake of ours, or a client that cancels its calls, must not cost a message, nor the worker.
            _log.exception("message %s is looked at again", item.raw.message_id, extra=self._about(item))
            return RetryAfter(1.0)

    def _go_on(self, item: InFlightMessage, then: Next) -> None:
        if then == "off":
            self._lines.done(item)
            self._activity.end()
            self.counts.in_flight = self._lines.size
        elif self._state is not TriggerState.RUNNING:
            self._left.append(item)
            return
        elif isinstance(then, OnHold):
            self._holding.add(item, then.reason)
            self.counts.held = len(self._holding)
            return
        else:
            self._waits[item] = asyncio.create_task(self._wait(item, then.delay_s))
        if self._holding:
            self._holding.release(item)
            self.counts.held = len(self._holding)

    async def _wait(self, item: InFlightMessage, delay_s: float) -> None:
        await self._sleep(delay_s)
        del self._waits[item]
        self._lines.requeue(item)

    def _record(self, execution: Any) -> None:
        assert self._records is not None
        self._records.put(execution)

    # Pausing -----------------------------------------------------------------------------------------

    def _on_holding(self) -> None:
        if self._state is TriggerState.RUNNING:
            task = asyncio.create_task(self._try_to_pause_adapter())
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _pause_adapter(self) -> None:
        """Make the adapter as it should be; one at a time, and the last wish counts."""
        async with self._pausing:
            wanted = self._paused or bool(self._holding)
            if wanted == self._adapter_paused or self._state is not TriggerState.RUNNING:
                return
            await (self._adapter.pause() if wanted else self._adapter.resume())
            self._adapter_paused = wanted

    async def _try_to_pause_adapter(self) -> None:
        try:
            await self._pause_adapter()
        except Exception as exc:  # noqa: BLE001 - lines are shut anyway: it only saves prefetching
            _log.warning(
                "trigger %s: the broker's client could not be paused: %s", self.config.name, type(exc).__name__
            )

    # Ending ------------------------------------------------------------------------------------------

    async def _wind_down(self, timeout_s: float) -> None:
        self._lines.close()
        await _cancel(self._tasks)
        waits = list(self._waits)
        await _cancel(list(self._waits.values()))
        self._left += [*waits, *await self._holding.stop()]
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=timeout_s)
            await _cancel(list(late))
        self._left += [item for item in self._lines.ready() if item.started_at_ms]
        await asyncio.gather(*(self._handler.abandon(item) for item in self._left))
        # Whether these were acted on is not known: their keys stay reserved until a lease has passed.
        self._left += self._busy
        await _cancel(list(self._background))
        if self._dedup is not None:
            await self._dedup.close()

    async def _close_records(self, give_up_at: float) -> None:
        if self._records is not None:
            await self._records.close(max(_LAST_RECORDS_S, give_up_at - asyncio.get_running_loop().time()))

    def _tell_what_was_left(self) -> None:
        untouched = self._lines.size - len(self._left)
        if self._left:
            some = ", ".join(item.raw.message_id for item in self._left[:_NAMED])
            _log.warning(
                "trigger %s stopped and left %d messages that it had begun (%s%s) and %d others: they are delivered "
                "again",
                self.config.name,
                len(self._left),
                some,
                ", …" if len(self._left) > _NAMED else "",
                untouched,
                extra=self._about(),
            )
        else:
            _log.info("trigger %s stopped, %d messages given back", self.config.name, untouched, extra=self._about())

    # Helpers -----------------------------------------------------------------------------------------

    async def _ask_adapter(self) -> bool:
        try:
            async with asyncio.timeout(_HEALTH_S):
                return await self._adapter.health_check()
        except Exception as exc:  # noqa: BLE001 - that is an answer, too
            _log.debug("trigger %s: the broker does not answer: %s", self.config.name, type(exc).__name__)
            return False

    def _has_stopped(self) -> bool:
        return self._state is not TriggerState.RUNNING

    def _must_run(self, what: str) -> None:
        if self._state is not TriggerState.RUNNING:
            raise UsageError(f"trigger {self.config.name} is {self._state.value}: there is nothing to {what}")

    def _about(self, item: InFlightMessage | None = None) -> dict[str, Any]:
        about = {"trigger": self.config.name, "queue": self.config.queue_name}
        return about if item is None else {**about, "message_id": item.raw.message_id, "trace_id": item.trace_id}

    def __repr__(self) -> str:
        return f"<QueueTrigger {self.config.name!r}, {self.state.value}>"


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
