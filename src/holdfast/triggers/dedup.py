"""Dedup keys for runtimes that do not detect duplicates themselves: one run per key (T5, T6.15–17).

    free ──reserve──► reserved ──complete──► known for the window ──► free
                         │ release: denied, dead letter, stopped
                         ▼
                       free

A key is reserved before the run and completed after it. A message whose key is reserved elsewhere waits. A holder that
has not renewed its key for a lease counts as crashed, and the key is reclaimed. The message may then run twice:
delivery is at least once for a runtime that does not detect duplicates.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, Literal, Protocol
from uuid import uuid4

import msgspec

from holdfast.clock import Clock, SystemClock
from holdfast.effects.runtime import EffectBatcher
from holdfast.errors import LedgerUnavailable
from holdfast.identity import new_identity
from holdfast.ledger.port.effects import EffectKey, EffectOutcome, EffectState, EffectStore, Reservation
from holdfast.triggers.envelope import key_or_hash

_log: Final = logging.getLogger("holdfast.triggers")

_LEASE_S: Final = 30.0
#: Number of renewals per lease.
_RENEWALS: Final = 3
#: Limit of observed reservations of other processes.
_OBSERVED_LIMIT: Final = 100_000
#: Function name of these keys in the ledger.
_FUNCTION: Final = "trigger"


class DedupTicket:
    """A reservation held by this process."""

    __slots__ = ("key", "lock", "message_id", "tenant_id", "token")

    def __init__(self, tenant_id: str, key: str, message_id: str) -> None:
        self.tenant_id = tenant_id
        self.key = key
        self.message_id = message_id
        self.token = uuid4().hex
        #: Serialises renewal and release: a late renewal must not reserve a released key again.
        self.lock = asyncio.Lock()


class AlreadyHandled(msgspec.Struct, frozen=True):
    """The key was completed by this run."""

    run_id: str


#: Reserved now; completed before; or reserved elsewhere, check again later.
Answer = DedupTicket | AlreadyHandled | Literal["busy"]


class IdempotencyStore(Protocol):
    """Store of dedup keys. Methods raise `LedgerUnavailable` while it is unreachable."""

    async def reserve(self, tenant_id: str, key: str, message_id: str) -> Answer:
        """Reserve the key, if it is free."""
        ...

    async def complete(self, ticket: DedupTicket, run_id: str, window_ms: int) -> None:
        """Record the run. The key is known for the window."""
        ...

    async def release(self, ticket: DedupTicket) -> None:
        """Free the key: the message did not run, or may run again."""
        ...

    def abandon(self, ticket: DedupTicket) -> None:
        """Stop renewing a key without releasing it, for example during an outage. It can be reclaimed later."""
        ...

    async def close(self) -> None:
        """Stop renewing all keys."""
        ...


class InMemoryIdempotencyStore(IdempotencyStore):
    """Keys in this process only: for tests, and for triggers that run in one process."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._reserved: dict[tuple[str, str], str] = {}
        self._done: dict[tuple[str, str], tuple[str, int]] = {}

    async def reserve(self, tenant_id: str, key: str, message_id: str) -> Answer:
        slot = (tenant_id, key)
        done = self._done.get(slot)
        if done is not None:
            if done[1] > self._clock.now_ms():
                return AlreadyHandled(done[0])
            del self._done[slot]
        if slot in self._reserved:
            return "busy"
        ticket = DedupTicket(tenant_id, key, message_id)
        self._reserved[slot] = ticket.token
        return ticket

    async def complete(self, ticket: DedupTicket, run_id: str, window_ms: int) -> None:
        slot, now_ms = (ticket.tenant_id, ticket.key), self._clock.now_ms()
        self._reserved.pop(slot, None)
        self._done.pop(slot, None)
        self._done[slot] = (run_id, now_ms + window_ms)
        # Ordered by age: remove expired keys when a new one is added.
        while (oldest := next(iter(self._done))) != slot and self._done[oldest][1] <= now_ms:
            del self._done[oldest]

    async def release(self, ticket: DedupTicket) -> None:
        self.abandon(ticket)

    def abandon(self, ticket: DedupTicket) -> None:
        self._reserved.pop((ticket.tenant_id, ticket.key), None)

    async def close(self) -> None:
        self._reserved.clear()


class LedgerIdempotencyStore(IdempotencyStore):
    """Keys in the ledger's `idempotency_keys`, for any number of processes. Use it in one event loop."""

    def __init__(
        self,
        effects: EffectStore,
        queue_name: str,
        *,
        lease_s: float = _LEASE_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batcher = EffectBatcher(effects)
        self._queue = queue_name
        self._lease_s = lease_s
        self._monotonic = monotonic
        self._worker = new_identity("trigger")
        #: Reservations of this process, by token.
        self._active: dict[str, DedupTicket] = {}
        #: Reservations of other processes, and since when each is unchanged, by the local clock: other clocks may
        #: differ.
        self._observed: dict[tuple[str, str], tuple[tuple[str, int], float]] = {}
        self._renewing: asyncio.Task[None] | None = None

    async def reserve(self, tenant_id: str, key: str, message_id: str) -> Answer:
        ticket = DedupTicket(tenant_id, key_or_hash(f"trigger:{key}"), message_id)
        current = await self._reserve(ticket)
        if current.token != ticket.token and self._is_lost(ticket, current):
            _log.warning(
                "message %s was started by %s, which stopped renewing its key; running it again",
                current.job_id,
                current.worker,
            )
            current = await self._reserve(ticket, replaces=current.token)
        slot = (ticket.tenant_id, ticket.key)
        if current.token == ticket.token:
            self._observed.pop(slot, None)
            self._renew()
            return ticket
        self._active.pop(ticket.token, None)
        if current.state is EffectState.DONE:
            self._observed.pop(slot, None)
            return AlreadyHandled(msgspec.json.decode(current.value, type=str) if current.value else "")
        return "busy"

    async def complete(self, ticket: DedupTicket, run_id: str, window_ms: int) -> None:
        outcome = self._outcome(ticket, EffectState.DONE, msgspec.json.encode(run_id), window_ms)
        async with ticket.lock:
            applied = await self._batcher.conclude(outcome)
            self._active.pop(ticket.token, None)
        if not applied:
            _log.error("key %r was reclaimed during the run; it may have run twice", ticket.key)

    async def release(self, ticket: DedupTicket) -> None:
        async with ticket.lock:
            self._active.pop(ticket.token, None)
            await self._batcher.conclude(self._outcome(ticket, None))

    def abandon(self, ticket: DedupTicket) -> None:
        self._active.pop(ticket.token, None)

    async def close(self) -> None:
        """Stop renewing. Keys still reserved are not released.

        Their runs may still be active in a thread. Another process can reclaim the keys after a lease.
        """
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        self._active.clear()

    async def _reserve(self, ticket: DedupTicket, replaces: str = "") -> EffectKey:
        # Before the reservation: a concurrent call that finds the key reserved must see that it is active here.
        self._active[ticket.token] = ticket
        try:
            return await self._batcher.reserve(self._reservation(ticket, replaces))
        except BaseException:
            # If the reservation was made anyway, it is found by the worker name and reclaimed.
            self._active.pop(ticket.token, None)
            raise

    def _reservation(self, ticket: DedupTicket, replaces: str) -> Reservation:
        return Reservation(
            tenant_id=ticket.tenant_id,
            key=ticket.key,
            function=_FUNCTION,
            fingerprint="",
            token=ticket.token,
            queue=self._queue,
            job_id=ticket.message_id,
            attempt=0,
            worker=self._worker,
            replaces_token=replaces,
        )

    def _outcome(
        self, ticket: DedupTicket, state: EffectState | None, value: bytes | None = None, ttl_ms: int = 0
    ) -> EffectOutcome:
        return EffectOutcome(
            tenant_id=ticket.tenant_id,
            key=ticket.key,
            token=ticket.token,
            state=state,
            value=value,
            ttl_ms=ttl_ms or None,
        )

    def _is_lost(self, ticket: DedupTicket, current: EffectKey) -> bool:
        """Whether the current reservation is lost: its holder has not renewed it for a lease."""
        if current.state is EffectState.DONE or current.token in self._active:
            return False
        if current.worker == self._worker:
            # Reserved by a call whose answer was lost.
            return True
        slot, now, state = (ticket.tenant_id, ticket.key), self._monotonic(), (current.token, current.updated_at_ms)
        previous, since = self._observed.get(slot, (None, now))
        if previous != state:
            if len(self._observed) >= _OBSERVED_LIMIT:
                # Most are of messages delivered elsewhere; those still waiting are recorded again.
                self._observed.clear()
            self._observed[slot] = (state, now)
            return False
        return now - since >= self._lease_s

    # Renewing ----------------------------------------------------------------------------------------

    def _renew(self) -> None:
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._keep_renewing(), name="holdfast-trigger-keys")

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / _RENEWALS)
            tickets = list(self._active.values())
            if not tickets:
                return
            await asyncio.gather(*(self._renew_one(ticket) for ticket in tickets))

    async def _renew_one(self, ticket: DedupTicket) -> None:
        async with ticket.lock:
            if ticket.token not in self._active:
                return
            try:
                # Replacing its own reservation updates its timestamp, which shows others that the holder is alive.
                await self._batcher.reserve(self._reservation(ticket, ticket.token))
            except LedgerUnavailable as exc:
                _log.warning("key not renewed: %s", exc)
