"""In-memory effects and steps for inline mode and `make_context`.

They pass the same effects contract as the ledgers. Safe to use from several event loops and threads.
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
    """The part of a ledger that effects and steps need."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.effects: EffectStore = MemoryEffects(clock)


class MemoryEffects(EffectStore):
    """An `EffectStore` that keeps its data in the object."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, str], EffectKey] = {}
        #: When a done key may be reserved again.
        self._expires_at_ms: dict[tuple[str, str], int] = {}
        self._steps: dict[JobKey, dict[int, Step]] = {}

    async def reserve(self, reservations: Sequence[Reservation]) -> list[EffectKey]:
        with self._lock:
            return [self._reserve(reservation) for reservation in reservations]

    async def conclude(self, outcomes: Sequence[EffectOutcome]) -> list[bool]:
        with self._lock:
            return [self._conclude(outcome) for outcome in outcomes]

    async def get(self, keys: Sequence[tuple[str, str]]) -> list[EffectKey | None]:
        with self._lock:
            return [self._rows.get(key) for key in keys]

    async def steps(self, jobs: Sequence[JobKey]) -> list[list[Step]]:
        with self._lock:
            found = [self._steps.get(_clean(job), {}) for job in jobs]
            return [[recorded[position] for position in sorted(recorded)] for recorded in found]

    async def record_steps(self, steps: Sequence[Step]) -> list[Step]:
        with self._lock:
            return [self._record(step) for step in steps]

    def _reserve(self, reservation: Reservation) -> EffectKey:
        at, now_ms = (reservation.tenant_id, reservation.key), self._clock.now_ms()
        current = self._rows.get(at)
        if current is not None and not self._is_available(at, current, reservation, now_ms):
            return current
        self._expires_at_ms.pop(at, None)
        self._rows[at] = EffectKey(
            state=EffectState.RESERVED,
            token=reservation.token,
            value=None,
            function=reservation.function,
            fingerprint=reservation.fingerprint,
            queue=reservation.queue,
            job_id=clean(reservation.job_id),
            attempt=reservation.attempt,
            worker=clean(reservation.worker),
            reason="",
            updated_at_ms=now_ms,
        )
        return self._rows[at]

    def _is_available(self, at: tuple[str, str], current: EffectKey, reservation: Reservation, now_ms: int) -> bool:
        if current.state is EffectState.DONE:
            return _NEVER_MS < self._expires_at_ms.get(at, _NEVER_MS) <= now_ms
        return current.token == reservation.replaces_token

    def _conclude(self, outcome: EffectOutcome) -> bool:
        at = (outcome.tenant_id, outcome.key)
        current = self._rows.get(at)
        if current is None or current.token != outcome.token or current.state is EffectState.DONE:
            return holds_key(outcome, None if current is None else current.token)
        if outcome.state is None:
            del self._rows[at]
            return True
        done, now_ms = outcome.state is EffectState.DONE, self._clock.now_ms()
        if done and outcome.ttl_ms is not None:
            self._expires_at_ms[at] = now_ms + outcome.ttl_ms
        self._rows[at] = msgspec.structs.replace(
            current,
            state=outcome.state,
            value=outcome.value if done else None,
            reason=clean(outcome.reason),
            updated_at_ms=now_ms,
        )
        return True

    def _record(self, step: Step) -> Step:
        key = _clean(step.key)
        recorded = self._steps.setdefault(key, {})
        return recorded.setdefault(step.position, msgspec.structs.replace(step, key=key, name=clean(step.name)))


def _clean(job: JobKey) -> JobKey:
    return JobKey(job.tenant_id, job.queue, clean(job.job_id))
