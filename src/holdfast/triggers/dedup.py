"""Which messages have been acted on, for runtimes that cannot tell: one run per key (requirements T5, T6.15–17).

    free ──begin──► ours ──done──► known for the window ──► free
                      │ given up: denied, dead letter, stopped
                      ▼
                    free

A key is reserved before the run and concluded after it. One that somebody else holds is waited for; a holder that has
not renewed it for a lease is taken for dead, and its key is taken over: its run may then happen a second time, which is
what "at least once" means for a runtime that keeps no keys of its own.
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

_log: Final = logging.getLogger("holdfast.trigger")

_LEASE_S: Final = 30.0
#: How often a reservation is renewed within a lease.
_RENEWALS: Final = 3
#: Others' reservations that are watched at the same time.
_SEEN_LIMIT: Final = 100_000
#: What a key is bound to in the ledger.
_FUNCTION: Final = "trigger"


class DedupTicket:
    """A reservation of ours."""

    __slots__ = ("key", "message_id", "tenant_id", "token", "turn")

    def __init__(self, tenant_id: str, key: str, message_id: str) -> None:
        self.tenant_id = tenant_id
        self.key = key
        self.message_id = message_id
        self.token = uuid4().hex
        #: A renewal on its way must not bring back a key that has just been freed.
        self.turn = asyncio.Lock()


class AlreadyHandled(msgspec.Struct, frozen=True):
    """It has been acted on; by which run."""

    run_id: str


#: Ours now; done before; or somebody is at it: look again.
Answer = DedupTicket | AlreadyHandled | Literal["busy"]


class DedupStore(Protocol):
    """A store of keys. Methods raise `LedgerUnavailable` while it does not answer."""

    async def reserve(self, tenant_id: str, key: str, message_id: str) -> Answer:
        """Reserve the key, if it is free."""
        ...

    async def complete(self, ticket: DedupTicket, run_id: str, window_ms: int) -> None:
        """It has run: known from now on, for so long."""
        ...

    async def release(self, ticket: DedupTicket) -> None:
        """It has not run, or shall run again: the key is free."""
        ...

    def abandon(self, ticket: DedupTicket) -> None:
        """The store does not answer, and nobody will ask again: whoever comes next takes the key over."""
        ...

    async def close(self) -> None:
        """No more of it."""
        ...


class InMemoryDedupStore(DedupStore):
    """Keys of this process alone: for tests, and for triggers of which there is only one."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._held: dict[tuple[str, str], str] = {}
        self._done: dict[tuple[str, str], tuple[str, int]] = {}

    async def reserve(self, tenant_id: str, key: str, message_id: str) -> Answer:
        place = (tenant_id, key)
        done = self._done.get(place)
        if done is not None:
            if done[1] > self._clock.now_ms():
                return AlreadyHandled(done[0])
            del self._done[place]
        if place in self._held:
            return "busy"
        ticket = DedupTicket(tenant_id, key, message_id)
        self._held[place] = ticket.token
        return ticket

    async def complete(self, ticket: DedupTicket, run_id: str, window_ms: int) -> None:
        place, now_ms = (ticket.tenant_id, ticket.key), self._clock.now_ms()
        self._held.pop(place, None)
        self._done.pop(place, None)
        self._done[place] = (run_id, now_ms + window_ms)
        # The oldest come first: what has expired is forgotten as new ones come.
        while (oldest := next(iter(self._done))) != place and self._done[oldest][1] <= now_ms:
            del self._done[oldest]

    async def release(self, ticket: DedupTicket) -> None:
        self.abandon(ticket)

    def abandon(self, ticket: DedupTicket) -> None:
        self._held.pop((ticket.tenant_id, ticket.key), None)

    async def close(self) -> None:
        self._held.clear()


class LedgerDedupStore(DedupStore):
    """Keys in the ledger's `idempotency_keys`, for any number of processes. One event loop."""

    def __init__(
        self,
        effects: EffectStore,
        queue_name: str,
        *,
        lease_s: float = _LEASE_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._desk = EffectBatcher(effects)
        self._queue = queue_name
        self._lease_s = lease_s
        self._monotonic = monotonic
        self._worker = new_identity("trigger")
        #: Ours, by token.
        self._active: dict[str, DedupTicket] = {}
        #: Others' reservations, and since when they have been seen unchanged: by our clock, since theirs may be wrong.
        self._seen: dict[tuple[str, str], tuple[tuple[str, int], float]] = {}
        self._renewing: asyncio.Task[None] | None = None

    async def reserve(self, tenant_id: str, key: str, message_id: str) -> Answer:
        ticket = DedupTicket(tenant_id, key_or_hash(f"trigger:{key}"), message_id)
        held = await self._reserve(ticket)
        if held.token != ticket.token and self._is_lost(ticket, held):
            _log.warning("message %s was begun by %s, which is lost: it runs again", held.job_id, held.worker)
            held = await self._reserve(ticket, instead_of=held.token)
        place = (ticket.tenant_id, ticket.key)
        if held.token == ticket.token:
            self._seen.pop(place, None)
            self._renew()
            return ticket
        self._active.pop(ticket.token, None)
        if held.state is EffectState.DONE:
            self._seen.pop(place, None)
            return AlreadyHandled(msgspec.json.decode(held.value, type=str) if held.value else "")
        return "busy"

    async def complete(self, ticket: DedupTicket, run_id: str, window_ms: int) -> None:
        outcome = self._outcome(ticket, EffectState.DONE, msgspec.json.encode(run_id), window_ms)
        async with ticket.turn:
            held = await self._desk.conclude(outcome)
            self._active.pop(ticket.token, None)
        if not held:
            _log.error("the key %r was taken over while this process was at it: it may have run twice", ticket.key)

    async def release(self, ticket: DedupTicket) -> None:
        async with ticket.turn:
            self._active.pop(ticket.token, None)
            await self._desk.conclude(self._outcome(ticket, None))

    def abandon(self, ticket: DedupTicket) -> None:
        self._active.pop(ticket.token, None)

    async def close(self) -> None:
        """What is still reserved is free for others after a lease: it may be running yet, in a thread say."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        self._active.clear()

    async def _reserve(self, ticket: DedupTicket, instead_of: str = "") -> EffectKey:
        # Before it is made: whoever finds it must see that it is ours.
        self._active[ticket.token] = ticket
        try:
            return await self._desk.reserve(self._wish(ticket, instead_of))
        except BaseException:
            # If it was made all the same, it is found by our name and taken over.
            self._active.pop(ticket.token, None)
            raise

    def _wish(self, ticket: DedupTicket, instead_of: str) -> Reservation:
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
            replaces_token=instead_of,
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

    def _is_lost(self, ticket: DedupTicket, held: EffectKey) -> bool:
        """Whether its holder has been silent for a lease."""
        if held.state is EffectState.DONE or held.token in self._active:
            return False
        if held.worker == self._worker:
            # Reserved by a call whose answer never came.
            return True
        place, now, state = (ticket.tenant_id, ticket.key), self._monotonic(), (held.token, held.updated_at_ms)
        seen, since = self._seen.get(place, (None, now))
        if seen != state:
            if len(self._seen) >= _SEEN_LIMIT:
                # Of messages that went elsewhere: whoever still waits is seen again.
                self._seen.clear()
            self._seen[place] = (state, now)
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
        async with ticket.turn:
            if ticket.token not in self._active:
                return
            try:
                # Its own reservation once more: that moves its time, which is how others see that we live.
                await self._desk.reserve(self._wish(ticket, ticket.token))
            except LedgerUnavailable as exc:
                _log.warning("a key could not be renewed: %s", exc)
