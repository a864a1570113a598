"""The relay: publishes `outbox_events` to brokers and to the engine (O1, O2).

    lease lanes ──► read due events ──► publish ──► record results, fenced by the lane leases

Any number of relays may run: a relay leases whole lanes, so that no two publish the same key at a time. Events of one
key are published in the order in which they were written. Delivery is at least once: if a relay crashes between
publishing and recording, events are published again, with the same ids and in the same order. No transaction is open
during publishing. Every destination has its own loop, so a broker that is down delays only its own events.
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

#: Concurrent flights per destination: while one publishes, the others read and record.
_FLIGHTS: Final = 3
#: Maximum number of batches per flight. A flight keeps its lanes until it ends.
_BATCHES: Final = 8
#: Longest wait for new events if the store does not notify; and interval of the check for unknown destinations.
_WAIT_S: Final = 1.0
_UNKNOWN_S: Final = 5.0
#: Longest delay between retries during an outage.
_OUTAGE_MAX_S: Final = 30.0
_ERROR_LIMIT: Final = 1_000
_PRUNE_S: Final = 60.0
_PRUNE_LIMIT: Final = 2_000
#: How long a measured offset to the store's clock is used.
_CLOCK_S: Final = 30.0


class Relay:
    """Relays until `stop`. The caller creates store and destinations; the relay closes the destinations."""

    def __init__(
        self, store: OutboxStore, destinations: Mapping[str, Destination], settings: Settings, counts: Counters
    ) -> None:
        self.name = new_identity("relay")
        self._store = store
        self._destinations_by_name = dict(destinations)
        self._settings = settings
        #: Results of events, for metrics.
        self.numbers = counts.outbox = counts.outbox or OutboxStats()
        self._clock = _StoreClock(store)
        self._lanes = LaneLeases(store, self.name, settings)
        self._stopped = asyncio.Event()
        self._loops: list[_DestinationLoop] = []

    def stop(self) -> None:
        """Start no more batches and finish those in flight. Can be repeated."""
        self._stopped.set()
        for loop in self._loops:
            loop.wake()

    async def run(self) -> None:
        """Relay until stopped, through outages of store and brokers. Cancellation abandons batches in flight."""
        self._loops = [
            _DestinationLoop(self, name, destination) for name, destination in self._destinations_by_name.items()
        ]
        helpers = [asyncio.create_task(each) for each in (self._listen(), self._log_unknown(), self._prune())]
        running = [asyncio.create_task(loop.run()) for loop in self._loops]
        try:
            await asyncio.gather(*running)
        finally:
            for task in (*running, *helpers):
                task.cancel()
            await asyncio.gather(*running, *helpers, return_exceptions=True)
            await self._close()

    async def _close(self) -> None:
        for destination in self._destinations_by_name.values():
            await destination.close()
        try:
            await self._store.release_lanes(self.name)
        except LedgerUnavailable as exc:
            _log.warning("relay lanes not released, their leases will expire: %s", exc)

    async def _listen(self) -> None:
        """Wake all destination loops when events were written."""
        backoff = Backoff()
        while True:
            pause_s = 0.0
            try:
                await self._store.wait_for_events(_WAIT_S)
                backoff.reset()
            except LedgerUnavailable:
                pause_s = backoff.next_s()
            except Exception:  # noqa: BLE001 - top of a loop
                _log.exception("waiting for events failed unexpectedly, retrying")
                pause_s = backoff.next_s()
            raise_if_cancelled()
            await asyncio.sleep(pause_s)
            for loop in self._loops:
                loop.wake()

    async def _log_unknown(self) -> None:
        """Log destinations of events that this relay does not serve.

        Their events stay in the outbox: another relay may serve them, or this one once the destination is configured.
        """
        logged: set[str] = set()
        while True:
            try:
                unknown = {name for name in await self._store.destinations() if name not in self._destinations_by_name}
                for name in sorted(unknown - logged):
                    _log.warning(
                        "events are waiting for unknown destination %r, this relay serves %s; "
                        "add it to outbox_targets (HOLDFAST_OUTBOX_TARGETS) unless another relay serves it",
                        name,
                        ", ".join(sorted(self._destinations_by_name)) or "none",
                    )
                logged = unknown
            except LedgerUnavailable as exc:
                _log.debug("unknown destinations not checked: %s", exc)
            except Exception:  # noqa: BLE001 - top of a loop
                _log.exception("check for unknown destinations failed unexpectedly")
            raise_if_cancelled()
            await asyncio.sleep(_UNKNOWN_S)

    async def _prune(self) -> None:
        keep_ms = round(self._settings.outbox_retention_s * 1000)
        while True:
            deleted = 0
            try:
                deleted = await self._store.prune(keep_ms, _PRUNE_LIMIT)
            except LedgerUnavailable as exc:
                _log.debug("sent events not deleted: %s", exc)
            except Exception:  # noqa: BLE001 - top of a loop
                _log.exception("deleting sent events failed unexpectedly")
            raise_if_cancelled()
            await asyncio.sleep(0.2 if deleted >= _PRUNE_LIMIT else _PRUNE_S)


class _DestinationLoop:
    """Loop of one destination. Runs several flights; no two share a lane."""

    def __init__(self, relay: Relay, name: str, destination: Destination) -> None:
        self._store = relay._store
        self._relay = relay.name
        self._settings = relay._settings
        self._numbers = relay.numbers
        self._clock = relay._clock
        self._lanes = relay._lanes
        self._stopped = relay._stopped
        self._destinations = (name,)
        self._destination = destination
        self._sending = asyncio.Lock()
        self._woken = asyncio.Event()
        #: Lanes in use by flights.
        self._busy: set[int] = set()
        self._flights: set[asyncio.Task[None]] = set()
        self._outage_backoff = Backoff()
        #: Backoff for acquired lanes that turn out to have nothing due.
        self._empty_backoff = Backoff(base_s=0.01, cap_s=0.2)
        self._paused_until = 0.0

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._woken.clear()
                pause_s = await self._run_once()
                raise_if_cancelled()
                if pause_s > 0 and not self._stopped.is_set():
                    await _wait(self._woken, pause_s)
            await self._wait_for_flights()
        finally:
            for flight in self._flights:
                flight.cancel()
            await asyncio.gather(*self._flights, return_exceptions=True)

    async def _run_once(self) -> float:
        """Start a flight if possible. Returns how long to wait, unless woken."""
        if len(self._flights) >= _FLIGHTS:
            return _WAIT_S
        if (rest_s := self._paused_until - time.monotonic()) > 0:
            # Do not query a store that is down sooner because the loop was woken.
            await asyncio.sleep(min(rest_s, _WAIT_S))
        try:
            leased = await self._lanes.acquire(self._destinations, self._busy)
            if leased.lanes:
                self._start(leased)
                return 0.0
            return _WAIT_S if self._busy else await self._seconds_until_due()
        except LedgerUnavailable as exc:
            self._log_outage("cannot reach the outbox database, retrying: %s", exc)
        except Exception:  # noqa: BLE001 - top of a loop
            _log.exception("relay failed unexpectedly, retrying")
            self._paused_until = time.monotonic() + self._outage_backoff.next_s()
        return 0.0

    async def _seconds_until_due(self) -> float:
        due_ms = await self._store.next_due_ms(self._destinations, dead_blocks=self._settings.outbox_dead_blocks)
        self._outage_backoff.reset()
        if due_ms is None:
            return _WAIT_S
        rest_s = (due_ms - await self._clock.now_ms()) / 1000
        # Due but not available: another relay holds the lane.
        return min(_WAIT_S, rest_s) if rest_s > 0 else self._empty_backoff.next_s()

    def _log_outage(self, message: str, error: Exception) -> None:
        if not self._outage_backoff.failures:
            _log.warning(message, error)
        self._paused_until = time.monotonic() + self._outage_backoff.next_s()

    def _start(self, leased: HeldLanes) -> None:
        self._busy.update(leased.lanes)
        flight = asyncio.create_task(self._fly(leased))
        self._flights.add(flight)
        flight.add_done_callback(self._on_flight_done)

    def _on_flight_done(self, flight: asyncio.Task[None]) -> None:
        self._flights.discard(flight)
        self._woken.set()

    async def _wait_for_flights(self) -> None:
        while self._flights:
            await asyncio.wait(self._flights)

    async def _fly(self, leased: HeldLanes) -> None:
        """Publish some batches of these lanes, until nothing is due or they are lost. Releases the lanes."""
        try:
            for _ in range(_BATCHES):
                if not await self._batch(leased) or self._stopped.is_set():
                    break
        except LedgerUnavailable as exc:
            self._log_outage("cannot reach the outbox database, retrying: %s", exc)
        except Exception:  # noqa: BLE001 - top of a flight
            _log.exception("relay failed unexpectedly, retrying")
            self._paused_until = time.monotonic() + self._outage_backoff.next_s()
        finally:
            self._busy.difference_update(leased.lanes)
            await self._lanes.release(leased.lanes)

    async def _batch(self, leased: HeldLanes) -> bool:
        """Publish one batch. Returns whether these lanes have more."""
        settings, timeout_s = self._settings, self._settings.outbox_lease_s / 2
        events = await self._store.due_events(
            self._relay,
            leased.lanes,
            self._destinations,
            settings.outbox_batch,
            dead_blocks=settings.outbox_dead_blocks,
        )
        if not events:
            self._paused_until = time.monotonic() + self._empty_backoff.next_s()
            return False
        self._empty_backoff.reset()
        async with self._sending:
            if self._lanes.remaining_s(leased) <= timeout_s:
                # Publishing must end before another relay can acquire the lanes.
                _log.info("lease on %d lanes expires soon; reading their events again", len(leased.lanes))
                return False
            began = time.monotonic()
            answers = await self._destination.send(events, timeout_s)
            seconds = time.monotonic() - began
        now_ms = await self._clock.now_ms()
        results = publish_results(events, answers, settings, now_ms)
        if not await self._lanes.record_results(leased, results):
            _log.warning("lanes lost while publishing %d events; they will be published again", len(events))
            return False
        self._outage_backoff.reset()
        self._count(events, results, seconds, now_ms)
        return len(events) == settings.outbox_batch and all(result.status is OutboxStatus.SENT for result in results)

    def _count(
        self, events: Sequence[OutboxEvent], results: Sequence[PublishResult], seconds: float, now_ms: int
    ) -> None:
        outbox, written = self._numbers, {(event.tenant_id, event.id): event.created_at_ms for event in events}
        sent = [result for result in results if result.status is OutboxStatus.SENT]
        dead = [result for result in results if result.status is OutboxStatus.DEAD]
        outbox.success.add([seconds] * len(sent))
        outbox.dead.add([seconds] * len(dead))
        outbox.failure.add([seconds] * (len(results) - len(sent) - len(dead)))
        outbox.delay.add([max(0, now_ms - written[result.tenant_id, result.id]) / 1000 for result in sent])
        if dead:
            _log.error("%d events DEAD, first %s: %s", len(dead), dead[0].id, dead[0].last_error)
        elif len(sent) < len(results):
            failed = next(result for result in results if result.status is OutboxStatus.RETRYING)
            _log.warning("%d of %d events not published: %s", len(results) - len(sent), len(results), failed.last_error)


def publish_results(
    events: Sequence[OutboxEvent], answers: Sequence[Answer], settings: Settings, now_ms: int
) -> list[PublishResult]:
    """Convert the answers for a batch into results to record.

    An event after a failed one with the same key gets no result: it is published after that one.
    """
    results: list[PublishResult] = []
    failed: set[tuple[str, str, str]] = set()
    for event, answer in zip(events, answers, strict=True):
        key = (event.destination, event.topic, event.key)
        if event.key and key in failed:
            continue
        result = _to_result(event, answer, settings, now_ms)
        if result.status is not OutboxStatus.SENT:
            failed.add(key)
        results.append(result)
    return results


def _to_result(event: OutboxEvent, answer: Answer, settings: Settings, now_ms: int) -> PublishResult:
    if isinstance(answer, Published):
        return PublishResult(
            tenant_id=event.tenant_id,
            id=event.id,
            status=OutboxStatus.SENT,
            attempt_count=event.attempt_count,
            last_error=answer.note,
        )
    attempts = event.attempt_count + (not answer.limited)
    dead = answer.permanent or (attempts >= settings.outbox_max_attempts and not answer.outage)
    return PublishResult(
        tenant_id=event.tenant_id,
        id=event.id,
        status=OutboxStatus.DEAD if dead else OutboxStatus.RETRYING,
        attempt_count=attempts,
        next_retry_at_ms=None if dead else now_ms + _backoff_ms(attempts, answer, settings),
        last_error=redact_and_truncate(answer.reason, _ERROR_LIMIT),
    )


def _backoff_ms(attempts: int, answer: PublishFailed, settings: Settings) -> int:
    max_s = settings.outbox_backoff_max_s
    if answer.outage:
        max_s = min(max_s, _OUTAGE_MAX_S)
    return round(1000 * min(max_s, settings.outbox_backoff_base_s * 2.0 ** min(max(0, attempts - 1), 40)))


class _StoreClock:
    """The clock of the store, by an offset that is measured at intervals."""

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
