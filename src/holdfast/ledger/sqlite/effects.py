"""Effects and steps on SQLite, run by the file's only writer.

Nothing else writes meanwhile. A batch takes a few steps of SQLite for any number of keys: rows are passed and returned
as one JSON text, because every step releases the GIL and has to acquire it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from holdfast.clock import Clock
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
    rounds,
)
from holdfast.sqlite.transaction import Transaction
from holdfast.sqlite.writer import FileWriter

T = TypeVar("T")

_COLUMNS: Final = "function, fingerprint, token, queue, job_id, attempt, worker"


def _fields(names: str) -> str:
    """Columns of the rows in a JSON text."""
    return ", ".join(f"row.value ->> {number} AS {name}" for number, name in enumerate(names.split(", ")))


_RESERVE: Final = f"""
INSERT INTO idempotency_keys AS item (tenant_id, key, {_COLUMNS}, state, created_at, updated_at)
SELECT {_fields("tenant_id, key, " + _COLUMNS)}, 'reserved', :now_ms, :now_ms FROM json_each(:rows) AS row WHERE true
ON CONFLICT (tenant_id, key) DO UPDATE SET
    state = 'reserved', value = NULL, reason = NULL, expires_at = NULL, created_at = :now_ms, updated_at = :now_ms,
    function = excluded.function, fingerprint = excluded.fingerprint, token = excluded.token, queue = excluded.queue,
    job_id = excluded.job_id, attempt = excluded.attempt, worker = excluded.worker
WHERE (item.state = 'done' AND item.expires_at <= :now_ms)
    OR (item.state <> 'done' AND item.token IN (SELECT value FROM json_each(:instead_of)))
"""  # noqa: S608 - constants

_READ: Final = f"""
SELECT json_group_array(
    json_array(item.tenant_id, item.key, state, item.value, {_COLUMNS}, coalesce(reason, ''), updated_at)
)
FROM json_each(:keys) AS row JOIN idempotency_keys AS item
    ON item.tenant_id = row.value ->> 0 AND item.key = row.value ->> 1
"""  # noqa: S608 - constants

_CONCLUDE: Final = f"""
UPDATE idempotency_keys AS item
SET state = ended.state, value = ended.result, reason = ended.reason, updated_at = :now_ms,
    expires_at = :now_ms + ended.ttl_ms
FROM (SELECT {_fields("tenant_id, key, token, state, result, reason, ttl_ms")} FROM json_each(:rows) AS row) AS ended
WHERE item.tenant_id = ended.tenant_id AND item.key = ended.key AND item.token = ended.token AND item.state <> 'done'
"""  # noqa: S608 - constants

_FREE: Final = """
DELETE FROM idempotency_keys
WHERE state <> 'done' AND (tenant_id, key, token) IN
    (SELECT row.value ->> 0, row.value ->> 1, row.value ->> 2 FROM json_each(:rows) AS row)
"""

_STEP: Final = "json_array(step.tenant_id, step.queue, step.job_id, position, name, result, attempt)"

_STEPS: Final = f"""
SELECT json_group_array({_STEP})
FROM json_each(:jobs) AS row JOIN job_steps AS step
    ON step.tenant_id = row.value ->> 0 AND step.queue = row.value ->> 1 AND step.job_id = row.value ->> 2
"""  # noqa: S608 - constants

_RECORD: Final = f"""
INSERT INTO job_steps (tenant_id, queue, job_id, position, name, result, attempt, at)
SELECT {_fields("tenant_id, queue, job_id, position, name, result, attempt")}, :now_ms
FROM json_each(:rows) AS row WHERE true
ON CONFLICT (tenant_id, job_id, queue, position) DO NOTHING
"""  # noqa: S608 - constants

_RECORDED: Final = f"""
SELECT json_group_array({_STEP})
FROM json_each(:rows) AS row JOIN job_steps AS step
    ON step.tenant_id = row.value ->> 0 AND step.queue = row.value ->> 1 AND step.job_id = row.value ->> 2
    AND step.position = row.value ->> 3
"""  # noqa: S608 - constants

#: tenant, key, state, value, function, fingerprint, token, queue, job, attempt, worker, reason, updated
_HeldRow = tuple[str, str, EffectState, str | None, str, str, str, str, str, int, str, str, int]
_StepRow = tuple[str, str, str, int, str, str, int]
_held_rows: Final = msgspec.json.Decoder(list[_HeldRow])
_step_rows: Final = msgspec.json.Decoder(list[_StepRow])

_Key = tuple[str, str]


class SqliteEffectStore(EffectStore):
    """The effect store of a ledger on SQLite, in its own file or in the engine's."""

    def __init__(self, store: FileWriter, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def reserve(self, reservations: Sequence[Reservation]) -> list[EffectKey]:
        return await self._store.write(_reserve, reservations, self._clock.now_ms())

    async def conclude(self, outcomes: Sequence[EffectOutcome]) -> list[bool]:
        return await self._store.write(_conclude, outcomes, self._clock.now_ms())

    async def get(self, keys: Sequence[tuple[str, str]]) -> list[EffectKey | None]:
        found = await self._store.write(_read, keys, lazy=True)
        return [found.get(key) for key in keys]

    async def steps(self, jobs: Sequence[JobKey]) -> list[list[Step]]:
        cleaned = [_clean_key(job) for job in jobs]
        found: dict[JobKey, list[Step]] = {}
        for step in await self._store.write(_steps, dict.fromkeys(cleaned), lazy=True):
            found.setdefault(step.key, []).append(step)
        return [found.get(job, []) for job in cleaned]

    async def record_steps(self, steps: Sequence[Step]) -> list[Step]:
        return await self._store.write(_record, steps, self._clock.now_ms())


# In the writer's thread ----------------------------------------------------------------------------


def _reserve(transaction: Transaction, reservations: Sequence[Reservation], now_ms: int) -> list[EffectKey]:
    answers: dict[int, EffectKey] = {}
    for numbers in rounds(reservations, lambda reservation: (reservation.tenant_id, reservation.key)):
        some = [reservations[number] for number in numbers]
        rows = [
            (
                r.tenant_id,
                r.key,
                r.function,
                r.fingerprint,
                r.token,
                r.queue,
                clean(r.job_id),
                r.attempt,
                clean(r.worker),
            )
            for r in some
        ]
        instead_of = [r.replaces_token for r in some if r.replaces_token]
        transaction.execute(_RESERVE, {"rows": _json(rows), "instead_of": _json(instead_of), "now_ms": now_ms})
        found = _read(transaction, [(r.tenant_id, r.key) for r in some])
        answers |= {number: found[r.tenant_id, r.key] for number, r in zip(numbers, some, strict=True)}
    return [answers[number] for number in range(len(reservations))]


def _read(transaction: Transaction, keys: Iterable[_Key]) -> dict[_Key, EffectKey]:
    (text,) = transaction.execute(_READ, {"keys": _json(list(dict.fromkeys(keys)))}).fetchone()
    return {(row[0], row[1]): _effect_key(row) for row in _held_rows.decode(text)}


def _conclude(transaction: Transaction, outcomes: Sequence[EffectOutcome], now_ms: int) -> list[bool]:
    answers: dict[int, bool] = {}
    for numbers in rounds(outcomes, lambda outcome: (outcome.tenant_id, outcome.key)):
        some = [outcomes[number] for number in numbers]
        found = _read(transaction, [(outcome.tenant_id, outcome.key) for outcome in some])
        for number, outcome in zip(numbers, some, strict=True):
            item = found.get((outcome.tenant_id, outcome.key))
            answers[number] = holds_key(outcome, None if item is None else item.token)
        kept = [_ending(outcome) for outcome in some if outcome.state is not None]
        freed = [(outcome.tenant_id, outcome.key, outcome.token) for outcome in some if outcome.state is None]
        if kept:
            transaction.execute(_CONCLUDE, {"rows": _json(kept), "now_ms": now_ms})
        if freed:
            transaction.execute(_FREE, {"rows": _json(freed)})
    return [answers[number] for number in range(len(outcomes))]


def _steps(transaction: Transaction, jobs: Iterable[JobKey]) -> list[Step]:
    rows = [(job.tenant_id, job.queue, job.job_id) for job in jobs]
    (text,) = transaction.execute(_STEPS, {"jobs": _json(rows)}).fetchone()
    return sorted(map(_step, _step_rows.decode(text)), key=lambda step: step.position)


def _record(transaction: Transaction, steps: Sequence[Step], now_ms: int) -> list[Step]:
    rows = []
    for step in steps:
        job = _clean_key(step.key)
        rows.append(
            (job.tenant_id, job.queue, job.job_id, step.position, clean(step.name), step.result.decode(), step.attempt)
        )
    transaction.execute(_RECORD, {"rows": _json(rows), "now_ms": now_ms})
    (text,) = transaction.execute(_RECORDED, {"rows": _json(rows)}).fetchone()
    recorded = {(step.key, step.position): step for step in map(_step, _step_rows.decode(text))}
    return [recorded[_clean_key(step.key), step.position] for step in steps]


def _ending(outcome: EffectOutcome) -> tuple[Any, ...]:
    done = outcome.state is EffectState.DONE
    value = outcome.value.decode() if done and outcome.value is not None else None
    reason, ttl_ms = clean(outcome.reason) or None, outcome.ttl_ms if done else None
    return (outcome.tenant_id, outcome.key, outcome.token, outcome.state, value, reason, ttl_ms)


def _effect_key(row: _HeldRow) -> EffectKey:
    _, _, state, value, function, fingerprint, token, queue, job_id, attempt, worker, reason, updated_at_ms = row
    return EffectKey(
        state=state,
        token=token,
        value=None if value is None else value.encode(),
        function=function,
        fingerprint=fingerprint,
        queue=queue,
        job_id=job_id,
        attempt=attempt,
        worker=worker,
        reason=reason,
        updated_at_ms=updated_at_ms,
    )


def _step(row: _StepRow) -> Step:
    tenant_id, queue, job_id, position, name, result, attempt = row
    return Step(
        key=JobKey(tenant_id, queue, job_id), position=position, name=name, result=result.encode(), attempt=attempt
    )


def _clean_key(job: JobKey) -> JobKey:
    return JobKey(job.tenant_id, job.queue, clean(job.job_id))


def _json(rows: Any) -> str:
    return msgspec.json.encode(rows).decode()
