"""Once-only effects (requirement E2): reserve, act, record.

    free ──reserve──► reserved ──act, record──► done ──► a second caller gets the recorded result
                          │ an error, a timeout, a crash
                          ▼
                       in doubt ──► suspended, run again, or a check decides

Nothing is done without a reservation in the ledger. While the holder of a reservation has the lease on its job, other
callers wait. If the holder is lost, or its call ended with an error, the effect is in doubt: it may have happened. The
outcome is recorded by the reservation's token, not by the job's lease, so that a holder that finishes late resolves the
doubt.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn
from uuid import uuid4

import msgspec

from holdfast.core.codec import encode_json
from holdfast.core.job import Claim
from holdfast.core.retry import Backoff
from holdfast.core.text import clean
from holdfast.effects.functions import (
    _REASON_LIMIT,
    Check,
    Done,
    EffectOptions,
    NotDone,
    arguments_fingerprint,
    call_function,
    check_key,
    decode_result,
    function_name,
    inside_step,
)
from holdfast.effects.runtime import FINAL_WRITE_S, EffectBatcher, RunScope
from holdfast.errors import (
    EffectInDoubt,
    EffectMismatch,
    HoldfastError,
    InvalidOption,
    InvalidPayload,
    LedgerUnavailable,
    RunEnded,
    Unavailable,
)
from holdfast.ledger.port.effects import EffectKey, EffectOutcome, EffectState, Reservation

_log: Final = logging.getLogger("holdfast.effects")
#: Pause between checks of another caller's effect.
_POLL_FIRST_S: Final = 0.02
_POLL_CAP_S: Final = 1.0


@dataclass(slots=True)
class EffectTicket:
    """A reservation of this call: act, then conclude. If `value` is set, the effect is already done."""

    outcome: EffectOutcome
    value: bytes | None = None
    #: Why the key was in doubt when it was reserved again; empty if it was not. A failed call does not resolve it.
    doubt: str = ""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Effect:
    """One call of one function under one key."""

    def __init__(
        self,
        scope: RunScope,
        options: EffectOptions,
        key: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self._scope = scope
        self._tools = scope.tools
        self._claim: Claim = scope.claim
        self._options = options
        self._key = check_key(key)
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._bound_to = (function_name(function), arguments_fingerprint(function, args, kwargs))

    # On the event loop -------------------------------------------------------------------------------

    async def run(self) -> Any:
        """Return the function's result, or the recorded one."""
        ticket = await self.reserve()
        if ticket.value is not None:
            return self.decode(ticket.value)
        try:
            with inside_step("effect"):
                value = await call_function(
                    self._function, self._args, self._kwargs, late=lambda late: self._late(ticket, late)
                )
        except GeneratorExit:
            # The run was abandoned: nothing can be awaited here.
            self._tools.spawn(self.failed(ticket, asyncio.CancelledError("abandoned")))
            raise
        except BaseException as exc:
            await self._last_write(self.failed(ticket, exc))
            raise
        return await self._finish(ticket, value)

    async def _finish(self, ticket: EffectTicket, value: Any) -> Any:
        recording = asyncio.ensure_future(self.succeeded(ticket, value))
        try:
            return await asyncio.shield(recording)
        except asyncio.CancelledError:
            await self._last_write(recording)
            raise

    def _late(self, ticket: EffectTicket, value: Any) -> None:
        """Record the result of a thread that ended after its run, which resolves the doubt."""
        self._tools.spawn(_quietly(self.succeeded(ticket, value)))

    async def _last_write(self, writing: Awaitable[Any]) -> None:
        """Wait for a final write for a limited time, even if cancelled; it continues in the background."""
        task = self._tools.spawn(_quietly(writing))
        deadline = self._tools.loop.time() + FINAL_WRITE_S
        while not task.done() and (left_s := deadline - self._tools.loop.time()) > 0:
            try:
                await asyncio.wait([task], timeout=left_s)
            except asyncio.CancelledError:
                continue

    # The three parts, also used by threads, which act themselves ------------------------------------------

    async def reserve(self) -> EffectTicket:
        """Reserve the key, or get its result.

        Raises if the effect is in doubt, or in progress elsewhere for too long.
        """
        self._scope.check(self._what)
        store = await self._tools.store()
        backoff: Backoff | None = None
        deadline = self._tools.loop.time() + self._tools.timeout_s
        instead_of, doubt = "", ""
        while True:
            ticket = EffectTicket(self._outcome(uuid4().hex), doubt=doubt)
            recorded = await self._reserve(store, ticket, instead_of)
            instead_of, doubt = "", ""
            if recorded.token == ticket.outcome.token:
                if self._scope.ended:
                    await self.release(ticket)
                self._mark_in_doubt("it was under way when the run ended")
                return ticket
            self._check_binding(recorded)
            if recorded.state is EffectState.DONE:
                return EffectTicket(self._outcome(recorded.token), recorded.value)
            if recorded.state is EffectState.RESERVED and await self._is_in_progress(recorded):
                if self._tools.loop.time() >= deadline:
                    raise Unavailable(
                        f"the effect {self._key!r} has been in progress in job {recorded.job_id} for too long; "
                        "this job will be retried later"
                    )
                backoff = backoff or Backoff(base_s=_POLL_FIRST_S, cap_s=_POLL_CAP_S)
                await self._wait_for(recorded, backoff.next_s())
                continue
            resolved = await self._resolve(store, recorded)
            if isinstance(resolved, EffectTicket):
                return resolved
            instead_of = resolved
            if resolved and self._options.in_doubt == "run_again" and resolved not in self._tools.unused:
                doubt = _reason(recorded)

    async def succeeded(self, ticket: EffectTicket, value: Any) -> Any:
        """Record the result of the effect; returns it as recorded."""
        try:
            encoded = encode_json(value, f"the result of the effect {self._key!r}", self._tools.payload_limit)
        except HoldfastError as exc:
            reason = f"it happened, but its result cannot be kept: {exc}"
            self._mark_in_doubt(reason)
            await self._conclude(ticket, EffectState.IN_DOUBT, reason=reason)
            raise InvalidPayload(
                f"the effect {self._key!r} has happened, but its result cannot be kept ({exc}); it will not run again: "
                f"return a JSON value, then run `holdfast effects resolve {shlex.quote(self._key)} --done RESULT`"
            ) from exc
        await self._conclude(ticket, EffectState.DONE, value=encoded)
        self._scope.in_doubt.pop(self._key, None)
        return self.decode(encoded)

    async def failed(self, ticket: EffectTicket, error: BaseException) -> None:
        """Record that the function raised: in doubt, or certainly not done.

        If the ledger is unreachable, the reservation stays, which means in doubt as well once the attempt has ended.
        """
        # A doubt about an earlier call remains, even if this call certainly did nothing.
        certain = isinstance(error, self._options.not_done) and not ticket.doubt
        reason = f"{type(error).__name__}: {error}"[:_REASON_LIMIT]
        if certain:
            self._scope.in_doubt.pop(self._key, None)
        else:
            self._mark_in_doubt(reason)
        try:
            await self._conclude(ticket, None if certain else EffectState.IN_DOUBT, reason=reason)
        except LedgerUnavailable as exc:
            if certain:
                self._tools.release_later(ticket.outcome)
                return
            _log.warning("outcome of effect %r not recorded, it stays in doubt: %s", self._key, exc)

    async def release(self, ticket: EffectTicket) -> NoReturn:
        """Release the reservation of a run that ended before the act, and raise `RunEnded`."""
        self._scope.in_doubt.pop(self._key, None)
        self._tools.active.pop(ticket.outcome.token, None)
        ticket.ended.set()
        self._tools.release_later(_release_outcome(ticket))
        raise RunEnded(self._claim.job_id, self._what)

    def decode(self, value: bytes) -> Any:
        """Decode a recorded result to what the function would have returned."""
        return decode_result(self._function, value)

    @property
    def _what(self) -> str:
        return f"the effect {self._key!r}"

    def _mark_in_doubt(self, reason: str) -> None:
        """Record that an operator would have to decide if the run ended now."""
        if self._options.in_doubt == "suspend":
            self._scope.in_doubt[self._key] = reason

    # Reserving ---------------------------------------------------------------------------------------

    async def _reserve(self, store: EffectBatcher, ticket: EffectTicket, instead_of: str) -> EffectKey:
        token = ticket.outcome.token
        # Before the reservation: a caller that finds it in the ledger must see that it is in progress here.
        self._tools.active[token] = ticket.ended
        reserving = asyncio.ensure_future(store.reserve(self._reservation(token, instead_of)))
        try:
            recorded = await asyncio.shield(reserving)
        except BaseException as exc:
            del self._tools.active[token]
            if isinstance(exc, asyncio.CancelledError | LedgerUnavailable):
                # The reservation may exist all the same, and will not be used.
                reserving.add_done_callback(_consume)
                self._tools.release_later(_release_outcome(ticket))
            raise
        if recorded.token != token:
            del self._tools.active[token]
        return recorded

    def _reservation(self, token: str, instead_of: str) -> Reservation:
        function, arguments = self._bound_to
        claim = self._claim
        return Reservation(
            tenant_id=claim.tenant_id,
            key=self._key,
            function=function,
            fingerprint=arguments,
            token=token,
            queue=claim.queue,
            job_id=claim.job_id,
            attempt=claim.attempt,
            worker=claim.lease.worker,
            replaces_token=instead_of,
        )

    def _outcome(self, token: str) -> EffectOutcome:
        return EffectOutcome(tenant_id=self._claim.tenant_id, key=self._key, token=token, state=None)

    def _check_binding(self, recorded: EffectKey) -> None:
        function, arguments = self._bound_to
        if recorded.function != function:
            raise EffectMismatch(self._key, f"it belongs to {recorded.function}, not to {function}")
        if recorded.fingerprint != arguments:
            raise EffectMismatch(
                self._key, f"{function} was called with other arguments under it, in job {recorded.job_id}"
            )

    # Held by another caller ------------------------------------------------------------------------------

    async def _is_in_progress(self, recorded: EffectKey) -> bool:
        """Whether its holder still runs: an effect of this process, or an attempt that has its lease."""
        if recorded.token in self._tools.active:
            return True
        claim = self._claim
        if recorded.worker == clean(claim.lease.worker):
            return False
        if (recorded.queue, recorded.job_id) == (claim.queue, clean(claim.job_id)):
            # An earlier attempt of this job: it has lost its lease, otherwise this attempt would not have one.
            return False
        return await self._tools.is_alive(recorded.queue, recorded.job_id, recorded.attempt, recorded.worker)

    async def _wait_for(self, recorded: EffectKey, pause_s: float) -> None:
        ended = self._tools.active.get(recorded.token)
        if ended is None:
            await asyncio.sleep(pause_s)
            return
        try:
            async with asyncio.timeout(_POLL_CAP_S):
                await ended.wait()
        except TimeoutError:
            return

    async def _resolve(self, store: EffectBatcher, recorded: EffectKey) -> EffectTicket | str:
        """Resolve an effect in doubt.

        Returns a ticket with its result, or the token of the reservation to replace; empty: check again.
        """
        if recorded.token in self._tools.unused:
            return recorded.token
        policy = self._options.in_doubt
        if policy == "run_again":
            _log.warning("effect %r is in doubt and runs again", self._key)
            return recorded.token
        if callable(policy):
            return await self._run_check(policy, recorded)
        reason = _reason(recorded)
        if recorded.state is EffectState.RESERVED:
            await store.conclude(
                msgspec.structs.replace(
                    self._outcome(recorded.token), state=EffectState.IN_DOUBT, reason=reason[:_REASON_LIMIT]
                )
            )
            now = await store.get(self._claim.tenant_id, self._key)
            if now is None or (now.state, now.token) != (EffectState.IN_DOUBT, recorded.token):
                # Its holder, or another caller, has just changed it.
                return ""
        raise EffectInDoubt(self._key, reason)

    async def _run_check(self, check: Check, recorded: EffectKey) -> EffectTicket | str:
        answer: Any = check(self._key)
        found: object = await answer if inspect.isawaitable(answer) else answer
        if isinstance(found, NotDone) or found is NotDone:
            return recorded.token
        if not isinstance(found, Done):
            raise InvalidOption(
                f"the check of the effect {self._key!r} must return Done(…) or NotDone(), not {found!r}"
            )
        value = encode_json(found.value, f"the result of the check of {self._key!r}", self._tools.payload_limit)
        outcome = msgspec.structs.replace(
            self._outcome(recorded.token), state=EffectState.DONE, value=value, ttl_ms=self._options.ttl_ms
        )
        concluded = await self._tools.conclude_with_retry(outcome, self._tools.timeout_s)
        return EffectTicket(outcome, value) if concluded else ""

    # Ending --------------------------------------------------------------------------------------------

    async def _conclude(
        self, ticket: EffectTicket, state: EffectState | None, *, value: bytes | None = None, reason: str = ""
    ) -> None:
        ttl_ms = self._options.ttl_ms if state is EffectState.DONE else None
        outcome = msgspec.structs.replace(ticket.outcome, state=state, value=value, reason=reason, ttl_ms=ttl_ms)
        try:
            recorded = await self._tools.conclude_with_retry(outcome, self._tools.timeout_s)
        finally:
            ticket.ended.set()
            self._tools.active.pop(outcome.token, None)
        if not recorded and state is EffectState.DONE:
            self._tools.counts.effect_duplicates += 1
            _log.error(
                "effect.duplicate: effect %r (tenant %s) was reserved again while job %s ran it: "
                "it may have happened twice",
                self._key,
                self._claim.tenant_id,
                self._claim.job_id,
            )


def _reason(recorded: EffectKey) -> str:
    return (
        recorded.reason or f"worker {recorded.worker} was lost in attempt {recorded.attempt} of job {recorded.job_id}"
    )


def _release_outcome(ticket: EffectTicket) -> EffectOutcome:
    """The outcome of an unused reservation: its key is free, or in doubt as before."""
    if not ticket.doubt:
        return ticket.outcome
    return msgspec.structs.replace(ticket.outcome, state=EffectState.IN_DOUBT, reason=ticket.doubt[:_REASON_LIMIT])


async def _quietly(writing: Awaitable[Any]) -> None:
    try:
        await writing
    except HoldfastError as exc:
        _log.error("late outcome of an effect not recorded: %s", exc)


def _consume(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a dropped call, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()
