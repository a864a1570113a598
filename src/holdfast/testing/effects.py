"""Effects and steps in memory, for inline mode and `make_context`: they pass the contract of every ledger.

Safe to use from several event loops and threads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import msgspec

from holdfast.clock import Clock, SystemClock
from holdfast.core.job import JobKey
from holdfast.core.text import clean
from holdfast.ledger.port.effects import (
    EffectKey,
    EffectOutcome,
    EffectState,
    EffectStore,
    Reservation,
    Step,
    holds_key,
)

_NEVER_MS: Final = 0


class MemoryLedger:
    """What effects and steps need of a ledger."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.effects: EffectStore = MemoryEffects(clock)


class MemoryEffects(EffectStore):
    """Role `Effects` of a ledger; gone with the object."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], EffectKey] = {}
        #: When a done key may be used again.
        self._expires_at_ms: dict[tuple[str, str], int] = {}
        self._steps: dict[JobKey, dict[int, Step]] = {}

    async def reserve(self, wishes: Sequence[Reservation]) -> list[EffectKey]:
        with self._lock:
            return [self._reserve(wish) for wish in wishes]

    async def conclude(self, outcomes: Sequence[EffectOutcome]) -> list[bool]:
        with self._lock:
            return [self._conclude(outcome) for outcome in outcomes]

    async def get(self, keys: Sequence[tuple[str, str]]) -> list[EffectKey | None]:
        with self._lock:
            return [self._held.get(key) for key in keys]

    async def steps(self, jobs: Sequence[JobKey]) -> list[list[Step]]:
        with self._lock:
            found = [self._steps.get(_cleaned(job), {}) for job in jobs]
            return [[recorded[position] for position in sorted(recorded)] for recorded in found]

    async def record_steps(self, steps: Sequence[Step]) -> list[Step]:
        with self._lock:
            return [self._record(step) for step in steps]

    def _reserve(self, wish: Reservation) -> EffectKey:
        at, now_ms = (wish.tenant_id, wish.key), self._clock.now_ms()
        held = self._held.get(at)
        if held is not None and not self._may_take(at, held, wish, now_ms):
            return held
        self._expires_at_ms.pop(at, None)
        self._held[at] = EffectKey(
            state=EffectState.RESERVED,
            token=wish.token,
            value=None,
            function=wish.function,
            fingerprint=wish.fingerprint,
            queue=wish.queue,
            job_id=clean(wish.job_id),
            attempt=wish.attempt,
            worker=clean(wish.worker),
            reason="",
            updated_at_ms=now_ms,
        )
        return self._held[at]

    def _may_take(self, at: tuple[str, str], held: EffectKey, wish: Reservation, now_ms: int) -> bool:
        if held.state is EffectState.DONE:
            return _NEVER_MS < self._expires_at_ms.get(at, _NEVER_MS) <= now_ms
        return held.token == wish.replaces_token

    def _conclude(self, outcome: EffectOutcome) -> bool:
        at = (outcome.tenant_id, outcome.key)
        held = self._held.get(at)
        if held is None or held.token != outcome.token or held.state is EffectState.DONE:
            return holds_key(outcome, None if held is None else held.token)
        if outcome.state is None:
            del self._held[at]
            return True
        done, now_ms = outcome.state is EffectState.DONE, self._clock.now_ms()
        if done and outcome.ttl_ms is not None:
            self._expires_at_ms[at] = now_ms + outcome.ttl_ms
        self._held[at] = msgspec.structs.replace(
            held,
            state=outcome.state,
            value=outcome.value if done else None,
            reason=clean(outcome.reason),
            updated_at_ms=now_ms,
        )
        return True

    def _record(self, step: Step) -> Step:
        key = _cleaned(step.key)
        recorded = self._steps.setdefault(key, {})
        return recorded.setdefault(step.position, msgspec.structs.replace(step, key=key, name=clean(step.name)))


def _cleaned(job: JobKey) -> JobKey:
    return JobKey(job.tenant_id, job.queue, clean(job.job_id))
