"""Once-only effects (requirement E2): reserve, act, record.

    free ──reserve──► reserved ──act, record──► done ──► a second caller gets the recorded result
                          │ an error, a timeout, a crash
                          ▼
                       in doubt ──► suspended, run again, or a check decides

Nothing is done without a reservation in the ledger. One whose holder lives is waited for; one whose holder is lost, or
that ended with an error, is in doubt: the effect may have happened. An end is recorded by the reservation's token,
not by the job's lease, so that a holder that comes back late resolves the doubt.
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
#: How long to wait between two looks at somebody else's effect.
_LOOK_FIRST_S: Final = 0.02
_LOOK_CAP_S: Final = 1.0


@dataclass(slots=True)
class EffectTicket:
    """A reservation of ours: now act, then conclude. `value`, if it was done before: then do not act."""

    outcome: EffectOutcome
    value: bytes | None = None
    #: Why the key was in doubt when it was taken over to act again; empty if it was not. That doubt stays.
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
        """The function's result, or the recorded one."""
        ticket = await self.reserve()
        if ticket.value is not None:
            return self.decode(ticket.value)
        try:
            with inside_step("effect"):
                value = await call_function(
                    self._function, self._args, self._kwargs, late=lambda late: self._late(ticket, late)
                )
        except GeneratorExit:
            # Thrown away under us: nothing can be awaited here any more.
            self._tools.spawn(self.failed(ticket, asyncio.CancelledError("thrown away")))
            raise
        except BaseException as exc:
            await self._last_word(self.failed(ticket, exc))
            raise
        return await self._finish(ticket, value)

    async def _finish(self, ticket: EffectTicket, value: Any) -> Any:
        recording = asyncio.ensure_future(self.succeeded(ticket, value))
        try:
            return await asyncio.shield(recording)
        except asyncio.CancelledError:
            await self._last_word(recording)
            raise

    def _late(self, ticket: EffectTicket, value: Any) -> None:
        """A thread that nobody could stop has come to its end after all: that resolves the doubt."""
        self._tools.spawn(_quietly(self.succeeded(ticket, value)))

    async def _last_word(self, words: Awaitable[Any]) -> None:
        """Say it, whatever happens to us, for a limited time."""
        speaking = self._tools.spawn(_quietly(words))
        give_up_at = self._tools.loop.time() + FINAL_WRITE_S
        while not speaking.done() and (left_s := give_up_at - self._tools.loop.time()) > 0:
            try:
                await asyncio.wait([speaking], timeout=left_s)
            except asyncio.CancelledError:
                continue

    # Its three parts: also for a thread, which acts by itself ------------------------------------------

    async def reserve(self) -> EffectTicket:
        """Reserve the key, or find out what became of it. Raises if it is in doubt, or under way for too long."""
        self._scope.check(self._what)
        desk = await self._tools.store()
        backoff: Backoff | None = None
        give_up_at = self._tools.loop.time() + self._tools.patience_s
        instead_of, doubt = "", ""
        while True:
            ticket = EffectTicket(self._outcome(uuid4().hex), doubt=doubt)
            held = await self._reserve(desk, ticket, instead_of)
            instead_of, doubt = "", ""
            if held.token == ticket.outcome.token:
                if self._scope.ended:
                    await self.release(ticket)
                self._note("it was under way when the run ended")
                return ticket
            self._check_binding(held)
            if held.state is EffectState.DONE:
                return EffectTicket(self._outcome(held.token), held.value)
            if held.state is EffectState.RESERVED and await self._is_under_way(held):
                if self._tools.loop.time() >= give_up_at:
                    raise Unavailable(
                        f"the effect {self._key!r} has been under way in job {held.job_id} for too long; "
                        "this job will look again later"
                    )
                backoff = backoff or Backoff(base_s=_LOOK_FIRST_S, cap_s=_LOOK_CAP_S)
                await self._wait_for(held, backoff.next_s())
                continue
            resolved = await self._resolve(desk, held)
            if isinstance(resolved, EffectTicket):
                return resolved
            instead_of = resolved
            if resolved and self._options.in_doubt == "run_again" and resolved not in self._tools.unused:
                doubt = _why(held)

    async def succeeded(self, ticket: EffectTicket, value: Any) -> Any:
        """It happened: record its result, and give it back as it was recorded."""
        try:
            encoded = encode_json(value, f"the result of the effect {self._key!r}", self._tools.payload_limit)
        except HoldfastError as exc:
            reason = f"it happened, but its result cannot be kept: {exc}"
            self._note(reason)
            await self._conclude(ticket, EffectState.IN_DOUBT, reason=reason)
            raise InvalidPayload(
                f"the effect {self._key!r} has happened, but its result cannot be kept ({exc}); it will not run again: "
                f"return something that is JSON, then `holdfast effects resolve {shlex.quote(self._key)} --done RESULT`"
            ) from exc
        await self._conclude(ticket, EffectState.DONE, value=encoded)
        self._scope.in_doubt.pop(self._key, None)
        return self.decode(encoded)

    async def failed(self, ticket: EffectTicket, error: BaseException) -> None:
        """It raised: in doubt, or certainly not done. A ledger that is away does not matter: the lease tells, too."""
        # What a call before this one did, nobody knows: that this one did nothing does not change it.
        certain = isinstance(error, self._options.not_done) and not ticket.doubt
        reason = f"{type(error).__name__}: {error}"[:_REASON_LIMIT]
        if certain:
            self._scope.in_doubt.pop(self._key, None)
        else:
            self._note(reason)
        try:
            await self._conclude(ticket, None if certain else EffectState.IN_DOUBT, reason=reason)
        except LedgerUnavailable as exc:
            if certain:
                self._tools.release_later(ticket.outcome)
                return
            _log.warning("the end of the effect %r could not be written, it stays in doubt: %s", self._key, exc)

    async def release(self, ticket: EffectTicket) -> NoReturn:
        """The run ended before the act: give the reservation back, and raise `RunOver`."""
        self._scope.in_doubt.pop(self._key, None)
        self._tools.active.pop(ticket.outcome.token, None)
        ticket.ended.set()
        self._tools.release_later(_unused(ticket))
        raise RunEnded(self._claim.job_id, self._what)

    def decode(self, value: bytes) -> Any:
        """A recorded result, as the function would have returned it."""
        return decode_result(self._function, value)

    @property
    def _what(self) -> str:
        return f"the effect {self._key!r}"

    def _note(self, why: str) -> None:
        """Remember that a person would have to decide, if the run ended now."""
        if self._options.in_doubt == "suspend":
            self._scope.in_doubt[self._key] = why

    # Reserving ---------------------------------------------------------------------------------------

    async def _reserve(self, desk: EffectBatcher, ticket: EffectTicket, instead_of: str) -> EffectKey:
        token = ticket.outcome.token
        # Before it is made: whoever finds it in the ledger must see that it is under way here.
        self._tools.active[token] = ticket.ended
        reserving = asyncio.ensure_future(desk.reserve(self._wish(token, instead_of)))
        try:
            held = await asyncio.shield(reserving)
        except BaseException as exc:
            del self._tools.active[token]
            if isinstance(exc, asyncio.CancelledError | LedgerUnavailable):
                # It may have been made all the same, and nothing will happen under it.
                reserving.add_done_callback(_consume)
                self._tools.release_later(_unused(ticket))
            raise
        if held.token != token:
            del self._tools.active[token]
        return held

    def _wish(self, token: str, instead_of: str) -> Reservation:
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

    def _check_binding(self, held: EffectKey) -> None:
        function, arguments = self._bound_to
        if held.function != function:
            raise EffectMismatch(self._key, f"it belongs to {held.function}, not to {function}")
        if held.fingerprint != arguments:
            raise EffectMismatch(
                self._key, f"{function} was called with other arguments under it, in job {held.job_id}"
            )

    # Somebody else has it ------------------------------------------------------------------------------

    async def _is_under_way(self, held: EffectKey) -> bool:
        """Whether its holder still lives: an effect of this process, or an attempt that has its lease."""
        if held.token in self._tools.active:
            return True
        claim = self._claim
        if held.worker == clean(claim.lease.worker):
            return False
        if (held.queue, held.job_id) == (claim.queue, clean(claim.job_id)):
            # An earlier attempt of this very job: it has lost its lease, or we would not have one.
            return False
        return await self._tools.is_alive(held.queue, held.job_id, held.attempt, held.worker)

    async def _wait_for(self, held: EffectKey, pause_s: float) -> None:
        over = self._tools.active.get(held.token)
        if over is None:
            await asyncio.sleep(pause_s)
            return
        try:
            async with asyncio.timeout(_LOOK_CAP_S):
                await over.wait()
        except TimeoutError:
            return

    async def _resolve(self, desk: EffectBatcher, held: EffectKey) -> EffectTicket | str:
        """An effect in doubt: a ticket with its result, or the token to take over; empty: look again."""
        if held.token in self._tools.unused:
            return held.token
        policy = self._options.in_doubt
        if policy == "run_again":
            _log.warning("the effect %r is in doubt and runs again", self._key)
            return held.token
        if callable(policy):
            return await self._ask(policy, held)
        why = _why(held)
        if held.state is EffectState.RESERVED:
            await desk.conclude(
                msgspec.structs.replace(
                    self._outcome(held.token), state=EffectState.IN_DOUBT, reason=why[:_REASON_LIMIT]
                )
            )
            now = await desk.get(self._claim.tenant_id, self._key)
            if now is None or (now.state, now.token) != (EffectState.IN_DOUBT, held.token):
                # Its holder, or somebody else, came in this very moment.
                return ""
        raise EffectInDoubt(self._key, why)

    async def _ask(self, check: Check, held: EffectKey) -> EffectTicket | str:
        answer: Any = check(self._key)
        found: object = await answer if inspect.isawaitable(answer) else answer
        if isinstance(found, NotDone) or found is NotDone:
            return held.token
        if not isinstance(found, Done):
            raise InvalidOption(
                f"the check of the effect {self._key!r} must answer Done(…) or NotDone(), not {found!r}"
            )
        value = encode_json(found.value, f"what the check says of {self._key!r}", self._tools.payload_limit)
        outcome = msgspec.structs.replace(
            self._outcome(held.token), state=EffectState.DONE, value=value, ttl_ms=self._options.ttl_ms
        )
        still_so = await self._tools.conclude_with_retry(outcome, self._tools.patience_s)
        return EffectTicket(outcome, value) if still_so else ""

    # Ending --------------------------------------------------------------------------------------------

    async def _conclude(
        self, ticket: EffectTicket, state: EffectState | None, *, value: bytes | None = None, reason: str = ""
    ) -> None:
        ttl_ms = self._options.ttl_ms if state is EffectState.DONE else None
        outcome = msgspec.structs.replace(ticket.outcome, state=state, value=value, reason=reason, ttl_ms=ttl_ms)
        try:
            held = await self._tools.conclude_with_retry(outcome, self._tools.patience_s)
        finally:
            ticket.ended.set()
            self._tools.active.pop(outcome.token, None)
        if not held and state is EffectState.DONE:
            self._tools.counts.effect_duplicates += 1
            _log.error(
                "effect.duplicate: the effect %r (tenant %s) was reserved again while job %s was at it: "
                "it may have happened twice",
                self._key,
                self._claim.tenant_id,
                self._claim.job_id,
            )


def _why(held: EffectKey) -> str:
    return held.reason or f"worker {held.worker} was lost in attempt {held.attempt} of job {held.job_id}"


def _unused(ticket: EffectTicket) -> EffectOutcome:
    """A reservation under which nothing was done: its key is free, or in doubt as before."""
    if not ticket.doubt:
        return ticket.outcome
    return msgspec.structs.replace(ticket.outcome, state=EffectState.IN_DOUBT, reason=ticket.doubt[:_REASON_LIMIT])


async def _quietly(words: Awaitable[Any]) -> None:
    try:
        await words
    except HoldfastError as exc:
        _log.error("the end of an effect that came late could not be recorded: %s", exc)


def _consume(future: asyncio.Future[Any]) -> None:
    """Look at its exception, so that asyncio does not complain."""
    if not future.cancelled():
        future.exception()
