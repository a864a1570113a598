"""Effects and steps on PostgreSQL: each batch is one transaction that locks its rows in key order.

Two batches that share keys meet at the unique index or at a row lock, always in the same order, so they cannot
deadlock. A key that occurs twice in a batch is handled in two rounds, as if the second call had come later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from holdfast.core.job import JobKey
from holdfast.core.text import clean
from holdfast.errors import LedgerUnavailable
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
from holdfast.ledger.postgres.store import Connection, PostgresStore

#: Attempts to reserve a key that is released between two statements, before the call fails.
_ROUNDS: Final = 20

_COLUMNS: Final = "function, fingerprint, token, queue, job_id, attempt, worker"

#: Columns that are read of a key.
_SHOWN: Final = f"""tenant_id, key, state, value, coalesce(reason, '') AS reason, {_COLUMNS},
    (extract(epoch FROM updated_at) * 1000)::bigint AS updated_at_ms"""

_RESERVE: Final = f"""
INSERT INTO idempotency_keys AS item (tenant_id, key, state, created_at, updated_at, {_COLUMNS})
SELECT tenant_id, key, 'reserved', now(), now(), {_COLUMNS}
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::int[], $9::text[])
    AS reservation (tenant_id, key, {_COLUMNS})
ORDER BY tenant_id, key
ON CONFLICT (tenant_id, key) DO UPDATE SET
    state = 'reserved', value = NULL, reason = NULL, expires_at = NULL, created_at = now(), updated_at = now(),
    function = excluded.function, fingerprint = excluded.fingerprint, token = excluded.token, queue = excluded.queue,
    job_id = excluded.job_id, attempt = excluded.attempt, worker = excluded.worker
WHERE (item.state = 'done' AND item.expires_at <= now()) OR (item.state <> 'done' AND item.token = ANY ($10::text[]))
RETURNING {_SHOWN}
"""  # noqa: S608 - constants

_READ: Final = f"""
SELECT {_SHOWN}
FROM idempotency_keys JOIN unnest($1::text[], $2::text[]) AS given (tenant_id, key) USING (tenant_id, key)
"""  # noqa: S608 - constants

_LOCK: Final = """
SELECT tenant_id, key, token, state
FROM idempotency_keys AS item JOIN unnest($1::text[], $2::text[]) AS given (tenant_id, key) USING (tenant_id, key)
ORDER BY tenant_id, key FOR UPDATE OF item
"""

_CONCLUDE: Final = """
UPDATE idempotency_keys AS item
SET state = ended.state, value = ended.value, reason = ended.reason, updated_at = now(),
    expires_at = now() + ended.ttl_ms * interval '1 millisecond'
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bigint[])
    AS ended (tenant_id, key, token, state, value, reason, ttl_ms)
WHERE (item.tenant_id, item.key, item.token) = (ended.tenant_id, ended.key, ended.token)
"""

_FREE: Final = """
DELETE FROM idempotency_keys AS item
USING unnest($1::text[], $2::text[], $3::text[]) AS ended (tenant_id, key, token)
WHERE (item.tenant_id, item.key, item.token) = (ended.tenant_id, ended.key, ended.token)
"""

_STEPS: Final = """
SELECT tenant_id, queue, job_id, position, name, result, attempt
FROM job_steps JOIN unnest($1::text[], $2::text[], $3::text[]) AS given (tenant_id, job_id, queue)
    USING (tenant_id, job_id, queue)
ORDER BY position
"""

_RECORD: Final = """
INSERT INTO job_steps (tenant_id, job_id, queue, position, name, result, attempt, at)
SELECT *, now() FROM unnest($1::text[], $2::text[], $3::text[], $4::int[], $5::text[], $6::text[], $7::int[]) AS step
ORDER BY 1, 2, 3, 4
ON CONFLICT DO NOTHING
"""

_RECORDED: Final = """
SELECT tenant_id, queue, job_id, position, name, result, attempt
FROM job_steps JOIN unnest($1::text[], $2::text[], $3::text[], $4::int[]) AS given (tenant_id, job_id, queue, position)
    USING (tenant_id, job_id, queue, position)
"""

_Key = tuple[str, str]


class PostgresEffectStore(EffectStore):
    """The effect store of a ledger on PostgreSQL."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def reserve(self, reservations: Sequence[Reservation]) -> list[EffectKey]:
        async def work(connection: Connection) -> list[EffectKey]:
            answers: dict[int, EffectKey] = {}
            for numbers in rounds(reservations, lambda reservation: (reservation.tenant_id, reservation.key)):
                found = await _reserve(connection, [reservations[number] for number in numbers])
                answers.update(zip(numbers, found, strict=True))
            return [answers[number] for number in range(len(reservations))]

        return await self._store.transact(work)

    async def conclude(self, outcomes: Sequence[EffectOutcome]) -> list[bool]:
        async def work(connection: Connection) -> list[bool]:
            answers: dict[int, bool] = {}
            for numbers in rounds(outcomes, lambda outcome: (outcome.tenant_id, outcome.key)):
                owned = await _conclude(connection, [outcomes[number] for number in numbers])
                answers.update(zip(numbers, owned, strict=True))
            return [answers[number] for number in range(len(outcomes))]

        return await self._store.transact(work)

    async def get(self, keys: Sequence[tuple[str, str]]) -> list[EffectKey | None]:
        async def work(connection: Connection) -> list[EffectKey | None]:
            found = await _read(connection, keys)
            return [found.get(key) for key in keys]

        return await self._store.transact(work)

    async def steps(self, jobs: Sequence[JobKey]) -> list[list[Step]]:
        cleaned = [_clean_key(job) for job in jobs]

        async def work(connection: Connection) -> list[list[Step]]:
            rows = await connection.fetch(
                _STEPS, *_columns([(job.tenant_id, job.job_id, job.queue) for job in dict.fromkeys(cleaned)], 3)
            )
            found: dict[JobKey, list[Step]] = {}
            for row in rows:
                step = _step(row)
                found.setdefault(step.key, []).append(step)
            return [found.get(job, []) for job in cleaned]

        return await self._store.transact(work)

    async def record_steps(self, steps: Sequence[Step]) -> list[Step]:
        async def work(connection: Connection) -> list[Step]:
            rows: dict[tuple[str, str, str, int], tuple[Any, ...]] = {}
            for step in steps:
                job = _clean_key(step.key)
                key = (job.tenant_id, job.job_id, job.queue, step.position)
                rows.setdefault(key, (*key, clean(step.name), step.result.decode(), step.attempt))
            await connection.execute(_RECORD, *_columns(rows.values(), 7))
            found = await connection.fetch(_RECORDED, *_columns(rows, 4))
            recorded = {(step.key, step.position): step for step in map(_step, found)}
            return [recorded[_clean_key(step.key), step.position] for step in steps]

        return await self._store.transact(work)


async def _reserve(connection: Connection, reservations: Sequence[Reservation]) -> list[EffectKey]:
    found: dict[_Key, EffectKey] = {}
    missing = list(reservations)
    for _ in range(_ROUNDS):
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
            for r in missing
        ]
        instead_of = [r.replaces_token for r in missing if r.replaces_token]
        found |= _group_by_key(await connection.fetch(_RESERVE, *_columns(rows, 9), instead_of))
        if reserved := [key for r in missing if (key := (r.tenant_id, r.key)) not in found]:
            found |= await _read(connection, reserved)
        # Another caller released these keys before they were read: try again.
        missing = [r for r in missing if (r.tenant_id, r.key) not in found]
        if not missing:
            return [found[r.tenant_id, r.key] for r in reservations]
    raise LedgerUnavailable("the effect keys were reserved and released too often during the call; retry")


async def _read(connection: Connection, keys: Iterable[_Key]) -> dict[_Key, EffectKey]:
    return _group_by_key(await connection.fetch(_READ, *_columns(dict.fromkeys(keys), 2)))


def _group_by_key(rows: Iterable[Any]) -> dict[_Key, EffectKey]:
    return {(row["tenant_id"], row["key"]): _effect_key(row) for row in rows}


async def _conclude(connection: Connection, outcomes: Sequence[EffectOutcome]) -> list[bool]:
    rows = await connection.fetch(_LOCK, *_columns([(outcome.tenant_id, outcome.key) for outcome in outcomes], 2))
    tokens = {(row["tenant_id"], row["key"]): row["token"] for row in rows}
    done = {(row["tenant_id"], row["key"]) for row in rows if row["state"] == EffectState.DONE}
    owned = [holds_key(outcome, tokens.get((outcome.tenant_id, outcome.key))) for outcome in outcomes]
    # A done effect is not changed. Checked here and not in SQL, where `state <> 'done'` makes the planner use the index
    # of keys in doubt: that is full of dead entries, and each call would take longer than the last.
    ended = [
        outcome
        for outcome, holds in zip(outcomes, owned, strict=True)
        if holds and (outcome.tenant_id, outcome.key) not in done
    ]
    if kept := [outcome for outcome in ended if outcome.state is not None]:
        await connection.execute(_CONCLUDE, *_columns([_ending(outcome) for outcome in kept], 7))
    if freed := [(outcome.tenant_id, outcome.key, outcome.token) for outcome in ended if outcome.state is None]:
        await connection.execute(_FREE, *_columns(freed, 3))
    return owned


def _ending(outcome: EffectOutcome) -> tuple[Any, ...]:
    value = outcome.value.decode() if outcome.value is not None and outcome.state is EffectState.DONE else None
    return (
        outcome.tenant_id,
        outcome.key,
        outcome.token,
        outcome.state,
        value,
        clean(outcome.reason) or None,
        outcome.ttl_ms if outcome.state is EffectState.DONE else None,
    )


def _effect_key(row: Any) -> EffectKey:
    value = row["value"]
    return EffectKey(
        state=EffectState(row["state"]),
        token=row["token"],
        value=None if value is None else value.encode(),
        function=row["function"],
        fingerprint=row["fingerprint"],
        queue=row["queue"],
        job_id=row["job_id"],
        attempt=row["attempt"],
        worker=row["worker"],
        reason=row["reason"],
        updated_at_ms=row["updated_at_ms"],
    )


def _step(row: Any) -> Step:
    return Step(
        key=JobKey(row["tenant_id"], row["queue"], row["job_id"]),
        position=row["position"],
        name=row["name"],
        result=row["result"].encode(),
        attempt=row["attempt"],
    )


def _clean_key(job: JobKey) -> JobKey:
    return JobKey(job.tenant_id, job.queue, clean(job.job_id))


def _columns(rows: Iterable[Sequence[Any]], width: int) -> list[list[Any]]:
    """Transpose rows into the arrays that `unnest` takes."""
    columns: list[list[Any]] = [[] for _ in range(width)]
    for row in rows:
        for column, value in zip(columns, row, strict=True):
            column.append(value)
    return columns
