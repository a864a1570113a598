"""The relay: from `outbox_events` to brokers and to the engine (requirements O1, O2).

    take lanes ──► read what is due ──► publish ──► mark, under the fence of the lanes

Any number may run at once: a relay holds whole lanes for a lease, so that no two publish one key at a time. Events of
one key are published in the order in which they were written. At least once: a relay that dies between publishing and
marking leaves events that are published again, under the same id and in the same order. No transaction is open while it
publishes. Every destination has a loop of its own: a broker that is down delays only its own events.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Final

from holdfast.aio import raise_if_cancelled
from holdfast.core.retry import Backoff
from holdfast.errors import LedgerUnavailable
from holdfast.identity import new_identity
from holdfast.ledger.port.messages import OutboxEvent, OutboxStatus, OutboxStore, PublishResult
from holdfast.observe.counters import Counters, OutboxStats
from holdfast.observe.redact import redact_and_truncate
from holdfast.outbox.destinations import Answer, Destination, Published, PublishFailed
from holdfast.outbox.lane_leases import HeldLanes, LaneLeases
from holdfast.settings import Settings

_log: Final = logging.getLogger("holdfast.outbox")

#: Batches of one destination on their way at a time: while one is published, others are read and marked.
_FLIGHTS: Final = 3
#: How many batches a flight stays with its lanes.
_BATCHES: Final = 8
#: How long to wait for news at most, should the store forget to tell; and how often to look for unknown destinations.
_WAIT_S: Final = 1.0
_LOOK_S: Final = 5.0
#: What passes by itself is tried again at least so often.
_PATIENT_MAX_S: Final = 30.0
_ERROR_LIMIT: Final = 1_000
_PRUNE_S: Final = 60.0
_PRUNE_LIMIT: Final = 2_000
#: How long the store's clock is taken to go on as this machine's does.
_CLOCK_S: Final = 30.0


class Relay:
    """Relays until `stop`. Store and outlets are the caller's to make; this closes the outlets."""

    def __init__(
        self, store: OutboxStore, outlets: Mapping[str, Destination], settings: Settings, counts: Counters
    ) -> None:
        self.name = new_identity("relay")
        self._store = store
        self._outlets = dict(outlets)
        self._settings = settings
        #: What became of events, for metrics.
        self.numbers = counts.outbox = counts.outbox or OutboxStats()
        self._clock = _StoreClock(store)
        self._lanes = LaneLeases(store, self.name, settings)
        self._stopped = asyncio.Event()
        self._lines: list[_DestinationLoop] = []

    def stop(self) -> None:
        """Take nothing more; what is on its way is finished. Safe to call twice."""
        self._stopped.set()
        for line in self._lines:
            line.wake()

    async def run(self) -> None:
        """Relay until stopped; no failure of a store or a broker ends it. Cancelled, it leaves what is on its way."""
        self._lines = [_DestinationLoop(self, name, outlet) for name, outlet in self._outlets.items()]
        helpers = [asyncio.create_task(each) for each in (self._listen(), self._look(), self._prune())]
        running = [asyncio.create_task(line.run()) for line in self._lines]
        try:
            await asyncio.gather(*running)
        finally:
            for task in (*running, *helpers):
                task.cancel()
            await asyncio.gather(*running, *helpers, return_exceptions=True)
            await self._leave()

    async def _leave(self) -> None:
        for outlet in self._outlets.values():
            await outlet.close()
        try:
            await self._store.release_lanes(self.name)
        except LedgerUnavailable as exc:
            _log.warning("the relay could not give its lanes back, they are free in a while: %s", exc)

    async def _listen(self) -> None:
        """Wake everybody when something was written."""
        backoff = Backoff()
        while True:
            pause_s = 0.0
            try:
                await self._store.wait_for_events(_WAIT_S)
                backoff.reset()
            except LedgerUnavailable:
                pause_s = backoff.next_s()
            except Exception:  # noqa: BLE001 - top of a loop
                _log.exception("waiting for events failed in an unexpected way, trying again")
                pause_s = backoff.next_s()
            raise_if_cancelled()
            await asyncio.sleep(pause_s)
            for line in self._lines:
                line.wake()

    async def _look(self) -> None:
        """Tell of events for destinations that this relay does not know. They are left as they are: another relay may
        serve them, or this one once it is told where they are."""
        told: set[str] = set()
        while True:
            try:
                unknown = {name for name in await self._store.destinations() if name not in self._outlets}
                for name in sorted(unknown - told):
                    _log.warning(
                        "events wait for the destination %r, and this relay knows only %s; "
                        "name it in outbox_targets (HOLDFAST_OUTBOX_TARGETS), unless another relay serves it",
                        name,
                        ", ".join(sorted(self._outlets)) or "none",
                    )
                told = unknown
            except LedgerUnavailable as exc:
                _log.debug("destinations could not be looked for: %s", exc)
            except Exception:  # noqa: BLE001 - top of a loop
                _log.exception("looking for destinations failed in an unexpected way")
            raise_if_cancelled()
            await asyncio.sleep(_LOOK_S)

    async def _prune(self) -> None:
        keep_ms = round(self._settings.outbox_retention_s * 1000)
        while True:
            gone = 0
            try:
                gone = await self._store.prune(keep_ms, _PRUNE_LIMIT)
            except LedgerUnavailable as exc:
                _log.debug("no sent events were deleted: %s", exc)
            except Exception:  # noqa: BLE001 - top of a loop
                _log.exception("deleting sent events failed in an unexpected way")
            raise_if_cancelled()
            await asyncio.sleep(0.2 if gone >= _PRUNE_LIMIT else _PRUNE_S)


class _DestinationLoop:
    """The loop of one destination: several flights, none over the same lanes as another."""

    def __init__(self, relay: Relay, destination: str, outlet: Destination) -> None:
        self._store = relay._store
        self._relay = relay.name
        self._settings = relay._settings
        self._numbers = relay.numbers
        self._clock = relay._clock
        self._lanes = relay._lanes
        self._stopped = relay._stopped
        self._destinations = (destination,)
        self._outlet = outlet
        self._sending = asyncio.Lock()
        self._woken = asyncio.Event()
        #: Lanes of flights.
        self._busy: set[int] = set()
        self._flights: set[asyncio.Task[None]] = set()
        self._trouble = Backoff()
        #: Lanes may be given in which nothing is due after all; they are not asked for again at once.
        self._fruitless = Backoff(base_s=0.01, cap_s=0.2)
        self._paused_until = 0.0

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._woken.clear()
                pause_s = await self._turn()
                raise_if_cancelled()
                if pause_s > 0 and not self._stopped.is_set():
                    await _wait(self._woken, pause_s)
            await self._landed()
        finally:
            for flight in self._flights:
                flight.cancel()
            await asyncio.gather(*self._flights, return_exceptions=True)

    async def _turn(self) -> float:
        """Start what can be started; how long to wait for more, unless woken."""
        if len(self._flights) >= _FLIGHTS:
            return _WAIT_S
        if (rest_s := self._paused_until - time.monotonic()) > 0:
            # Woken meanwhile: a store that is down is not asked any sooner for that.
            await asyncio.sleep(min(rest_s, _WAIT_S))
        try:
            held = await self._lanes.acquire(self._destinations, self._busy)
            if held.lanes:
                self._start(held)
                return 0.0
            return _WAIT_S if self._busy else await self._until_due()
        except LedgerUnavailable as exc:
            self._complain("events wait, the outbox's database does not answer: %s", exc)
        except Exception:  # noqa: BLE001 - top of a loop
            _log.exception("the relay failed in an unexpected way, trying again")
            self._paused_until = time.monotonic() + self._trouble.next_s()
        return 0.0

    async def _until_due(self) -> float:
        due_ms = await self._store.next_due_ms(self._destinations, dead_blocks=self._settings.outbox_dead_blocks)
        self._trouble.reset()
        if due_ms is None:
            return _WAIT_S
        rest_s = (due_ms - await self._clock.now_ms()) / 1000
        # Due and not to be had: another relay is at it.
        return min(_WAIT_S, rest_s) if rest_s > 0 else self._fruitless.next_s()

    def _complain(self, message: str, error: Exception) -> None:
        if not self._trouble.failures:
            _log.warning(message, error)
        self._paused_until = time.monotonic() + self._trouble.next_s()

    def _start(self, held: HeldLanes) -> None:
        self._busy.update(held.lanes)
        flight = asyncio.create_task(self._fly(held))
        self._flights.add(flight)
        flight.add_done_callback(self._over)

    def _over(self, flight: asyncio.Task[None]) -> None:
        self._flights.discard(flight)
        self._woken.set()

    async def _landed(self) -> None:
        while self._flights:
            await asyncio.wait(self._flights)

    async def _fly(self, held: HeldLanes) -> None:
        """A few batches of these lanes, until nothing is due or they are lost; then they are anybody's."""
        try:
            for _ in range(_BATCHES):
                if not await self._batch(held) or self._stopped.is_set():
                    break
        except LedgerUnavailable as exc:
            self._complain("events wait, the outbox's database does not answer: %s", exc)
        except Exception:  # noqa: BLE001 - top of a flight
            _log.exception("the relay failed in an unexpected way, trying again")
            self._paused_until = time.monotonic() + self._trouble.next_s()
        finally:
            self._busy.difference_update(held.lanes)
            await self._lanes.release(held.lanes)

    async def _batch(self, held: HeldLanes) -> bool:
        """One batch; whether there is more to do on these lanes."""
        settings, timeout_s = self._settings, self._settings.outbox_lease_s / 2
        events = await self._store.due_events(
            self._relay, held.lanes, self._destinations, settings.outbox_batch, dead_blocks=settings.outbox_dead_blocks
        )
        if not events:
            self._paused_until = time.monotonic() + self._fruitless.next_s()
            return False
        self._fruitless.reset()
        async with self._sending:
            if self._lanes.remaining_s(held) <= timeout_s:
                # Whoever takes them next must not meet us at it.
                _log.info("the lease on %d lanes is nearly over; their events are read again", len(held.lanes))
                return False
            began = time.monotonic()
            answers = await self._outlet.send(events, timeout_s)
            seconds = time.monotonic() - began
        now_ms = await self._clock.now_ms()
        marks = publish_results(events, answers, settings, now_ms)
        if not await self._lanes.record_results(held, marks):
            _log.warning("lanes were lost while %d events were published; they are published again", len(events))
            return False
        self._trouble.reset()
        self._count(events, marks, seconds, now_ms)
        return len(events) == settings.outbox_batch and all(mark.status is OutboxStatus.SENT for mark in marks)

    def _count(
        self, events: Sequence[OutboxEvent], marks: Sequence[PublishResult], seconds: float, now_ms: int
    ) -> None:
        outbox, written = self._numbers, {(event.tenant_id, event.id): event.created_at_ms for event in events}
        sent = [mark for mark in marks if mark.status is OutboxStatus.SENT]
        dead = [mark for mark in marks if mark.status is OutboxStatus.DEAD]
        outbox.success.add([seconds] * len(sent))
        outbox.dead.add([seconds] * len(dead))
        outbox.failure.add([seconds] * (len(marks) - len(sent) - len(dead)))
        outbox.delay.add([max(0, now_ms - written[mark.tenant_id, mark.id]) / 1000 for mark in sent])
        if dead:
            _log.error("%d events are DEAD, the first is %s: %s", len(dead), dead[0].id, dead[0].last_error)
        elif len(sent) < len(marks):
            failed = next(mark for mark in marks if mark.status is OutboxStatus.RETRYING)
            _log.warning(
                "%d of %d events were not published: %s", len(marks) - len(sent), len(marks), failed.last_error
            )


def publish_results(
    events: Sequence[OutboxEvent], answers: Sequence[Answer], settings: Settings, now_ms: int
) -> list[PublishResult]:
    """What becomes of the events of a batch.

    An event whose key has an earlier one that failed is not marked: it was not tried, and its turn comes after that.
    """
    marks: list[PublishResult] = []
    failed: set[tuple[str, str, str]] = set()
    for event, answer in zip(events, answers, strict=True):
        key = (event.destination, event.topic, event.key)
        if event.key and key in failed:
            continue
        mark = _mark(event, answer, settings, now_ms)
        if mark.status is not OutboxStatus.SENT:
            failed.add(key)
        marks.append(mark)
    return marks


def _mark(event: OutboxEvent, answer: Answer, settings: Settings, now_ms: int) -> PublishResult:
    if isinstance(answer, Published):
        return PublishResult(
            tenant_id=event.tenant_id,
            id=event.id,
            status=OutboxStatus.SENT,
            attempt_count=event.attempt_count,
            last_error=answer.note,
        )
    attempts = event.attempt_count + 1
    dead = answer.permanent or (attempts >= settings.outbox_max_attempts and not answer.outage)
    return PublishResult(
        tenant_id=event.tenant_id,
        id=event.id,
        status=OutboxStatus.DEAD if dead else OutboxStatus.RETRYING,
        attempt_count=attempts,
        next_retry_at_ms=None if dead else now_ms + _backoff_ms(attempts, answer, settings),
        last_error=redact_and_truncate(answer.why, _ERROR_LIMIT),
    )


def _backoff_ms(attempts: int, answer: PublishFailed, settings: Settings) -> int:
    most_s = settings.outbox_backoff_max_s
    if answer.outage:
        most_s = min(most_s, _PATIENT_MAX_S)
    return round(1000 * min(most_s, settings.outbox_backoff_base_s * 2.0 ** min(attempts - 1, 40)))


class _StoreClock:
    """The store's clock, asked for now and then."""

    def __init__(self, store: OutboxStore) -> None:
        self._store = store
        self._ahead_ms = 0
        self._good_until = 0.0

    async def now_ms(self) -> int:
        now = time.monotonic()
        if now >= self._good_until:
            self._ahead_ms = await self._store.now_ms() - round(now * 1000)
            self._good_until = now + _CLOCK_S
        return round(time.monotonic() * 1000) + self._ahead_ms


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
