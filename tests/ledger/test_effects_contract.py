"""The contract of effect stores: PostgreSQL, a SQLite ledger, the embedded engine's file, memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from holdfast.clock import SystemClock
from holdfast.core.job import JobKey
from holdfast.engine.sqlite.schema import prepare_schema
from holdfast.ledger.port.effects import EffectOutcome, EffectState, EffectStore, Reservation, Step
from holdfast.ledger.postgres.effects import PostgresEffectStore
from holdfast.ledger.postgres.store import PostgresStore
from holdfast.ledger.sqlite.effects import SqliteEffectStore
from holdfast.ledger.sqlite.store import SqliteLedgerStore, prepare_ledger
from holdfast.sqlite.connection import DatabaseFile
from holdfast.testing.effects import MemoryEffects

DONE, DOUBT, RESERVED = EffectState.DONE, EffectState.IN_DOUBT, EffectState.RESERVED


@pytest.fixture(params=["postgres", "sqlite", "embedded", "memory"])
async def effects(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EffectStore]:
    store: PostgresStore | SqliteLedgerStore
    if request.param == "memory":
        yield MemoryEffects()
        return
    if request.param == "postgres":
        store = PostgresStore(request.getfixturevalue("postgres_url"))
        yield PostgresEffectStore(store)
    else:
        prepare = prepare_ledger if request.param == "sqlite" else prepare_schema
        store = SqliteLedgerStore(DatabaseFile(str(tmp_path / "ledger.db")), prepare)
        yield SqliteEffectStore(store, SystemClock())
    await store.close()


def reservation(key: str = "k", **fields: Any) -> Reservation:
    defaults: dict[str, Any] = {
        "tenant_id": "t",
        "key": key,
        "function": "publish",
        "fingerprint": "f",
        "token": uuid4().hex,
        "queue": "q",
        "job_id": "j",
        "attempt": 1,
        "worker": "w",
    }
    return Reservation(**defaults | fields)


def outcome(reservation: Reservation, state: EffectState | None, **fields: Any) -> EffectOutcome:
    value = b"1" if state is DONE else None
    return EffectOutcome(
        **{
            "tenant_id": reservation.tenant_id,
            "key": reservation.key,
            "token": reservation.token,
            "state": state,
            "value": value,
        }
        | fields
    )


async def test_the_first_reservation_holds_the_key(effects: EffectStore) -> None:
    first, second = reservation(job_id="one"), reservation(job_id="two", attempt=3, worker="x")
    (row,) = await effects.reserve([first])
    assert (row.state, row.token, row.value, row.reason) == (RESERVED, first.token, None, "")
    (found,) = await effects.reserve([second])
    assert (found.state, found.token, found.job_id, found.attempt, found.worker) == (
        RESERVED,
        first.token,
        "one",
        1,
        "w",
    )
    assert (found.function, found.fingerprint, found.queue) == ("publish", "f", "q")
    assert await effects.get([("t", "k"), ("other", "k"), ("t", "none")]) == [found, None, None]


async def test_a_repeated_reservation_is_the_same_one(effects: EffectStore) -> None:
    mine = reservation()
    assert await effects.reserve([mine]) == await effects.reserve([mine])


async def test_a_key_belongs_to_a_tenant(effects: EffectStore) -> None:
    mine, theirs = reservation(tenant_id="a"), reservation(tenant_id="b")
    assert [row.token for row in await effects.reserve([mine, theirs])] == [mine.token, theirs.token]


async def test_a_key_twice_in_one_batch_has_one_winner(effects: EffectStore) -> None:
    reservations = [reservation(), reservation("other"), reservation(), reservation()]
    rows = await effects.reserve(reservations)
    assert [row.token for row in rows] == [
        reservations[0].token,
        reservations[1].token,
        reservations[0].token,
        reservations[0].token,
    ]


async def test_a_thousand_concurrent_reservations_have_one_winner_per_key(effects: EffectStore) -> None:
    batches = [[reservation(f"k{key}") for key in range(10)][:: 1 if batch % 2 else -1] for batch in range(100)]
    rows = await asyncio.gather(*map(effects.reserve, batches))
    holders: dict[str, set[str]] = {}
    for reservations, batch_rows in zip(batches, rows, strict=True):
        for requested, row in zip(reservations, batch_rows, strict=True):
            holders.setdefault(requested.key, set()).add(row.token)
    assert len(holders) == 10
    assert all(len(tokens) == 1 for tokens in holders.values()), holders


async def test_a_done_effect_returns_its_value_and_does_not_change(effects: EffectStore) -> None:
    mine = reservation()
    await effects.reserve([mine])
    value = '{"größe": 1, "n": 12345678901234567890, "empty": []}'.encode()
    assert await effects.conclude([outcome(mine, DONE, value=value)]) == [True]
    (row,) = await effects.reserve([reservation()])
    assert (row.state, row.value, row.token) == (DONE, value, mine.token)
    # A repeated or late outcome from the same holder changes nothing.
    assert await effects.conclude([outcome(mine, DONE), outcome(mine, DOUBT), outcome(mine, None)]) == [
        True,
        True,
        True,
    ]
    assert await effects.get([("t", "k")]) == [row]


async def test_in_doubt_keeps_the_key_and_its_holder_may_resolve_it(effects: EffectStore) -> None:
    mine = reservation()
    await effects.reserve([mine])
    assert await effects.conclude([outcome(mine, DOUBT, reason="nul \0 and \ud800 half")]) == [True]
    (row,) = await effects.reserve([reservation()])
    assert (row.state, row.token) == (DOUBT, mine.token)
    assert row.reason.startswith("nul ")
    assert await effects.conclude([outcome(mine, DONE)]) == [True]
    (row,) = await effects.reserve([reservation()])
    assert (row.state, row.value, row.reason) == (DONE, b"1", "")


async def test_not_done_releases_the_key(effects: EffectStore) -> None:
    mine, later = reservation(), reservation()
    await effects.reserve([mine])
    assert await effects.conclude([outcome(mine, None)]) == [True]
    assert await effects.get([("t", "k")]) == [None]
    # The reply was lost; the call is repeated.
    assert await effects.conclude([outcome(mine, None)]) == [True]
    (row,) = await effects.reserve([later])
    assert row.token == later.token
    assert await effects.conclude([outcome(mine, None)]) == [False]
    assert (await effects.get([("t", "k")]))[0] == row


@pytest.mark.parametrize("state", [RESERVED, DOUBT])
async def test_a_reservation_is_replaced_by_its_token_and_its_first_holder_is_refused(
    effects: EffectStore, state: EffectState
) -> None:
    lost, other = reservation(job_id="lost"), reservation(job_id="other", replaces_token="another token")
    successor, late = (
        reservation(job_id="heir", replaces_token=lost.token),
        reservation(job_id="late", replaces_token=lost.token),
    )
    await effects.reserve([lost])
    if state is DOUBT:
        await effects.conclude([outcome(lost, DOUBT, reason="why")])
    assert (await effects.reserve([other]))[0].token == lost.token
    # A reservation without a token to replace does not replace because another one in its batch does.
    rows = await effects.reserve([reservation(), successor, late])
    assert [row.token for row in rows] == [lost.token, successor.token, successor.token]
    assert (rows[1].state, rows[1].job_id, rows[1].reason) == (RESERVED, "heir", "")
    assert await effects.conclude([outcome(lost, DONE, value=b"2")]) == [False]
    assert await effects.conclude([outcome(successor, DONE, value=b"3")]) == [True]
    (row,) = await effects.reserve([reservation(replaces_token=successor.token)])
    assert (row.state, row.value) == (DONE, b"3")


async def test_an_outcome_without_a_reservation_is_refused(effects: EffectStore) -> None:
    assert await effects.conclude([outcome(reservation(), DONE), outcome(reservation(), DOUBT)]) == [False, False]
    assert await effects.get([("t", "k")]) == [None]


async def test_only_a_done_key_is_released_after_its_ttl(effects: EffectStore) -> None:
    short, long, doubt = reservation("short"), reservation("long"), reservation("doubt")
    await effects.reserve([short, long, doubt])
    await effects.conclude(
        [outcome(short, DONE, ttl_ms=1), outcome(long, DONE, ttl_ms=60_000), outcome(doubt, DOUBT, ttl_ms=1)]
    )
    await asyncio.sleep(0.01)
    reservations = [reservation("short"), reservation("long"), reservation("doubt")]
    rows = await effects.reserve(reservations)
    assert [row.token for row in rows] == [reservations[0].token, long.token, doubt.token]
    assert (rows[0].state, rows[0].value) == (RESERVED, None)


async def test_steps_are_returned_by_position_and_the_first_record_wins(effects: EffectStore) -> None:
    job, other = JobKey("t", "q", "j"), JobKey("t", "q2", "j")

    def step(position: int, name: str, result: bytes, key: JobKey = job, attempt: int = 1) -> Step:
        return Step(key=key, position=position, name=name, result=result, attempt=attempt)

    first = step(2, "two", b'"zwei \xc3\xbc"')
    assert await effects.record_steps([first, step(1, "one", b"[]")]) == [first, step(1, "one", b"[]")]
    late = [step(2, "two", b'"late"', attempt=2), step(3, "three", b"3", attempt=2), step(1, "x", b"0", key=other)]
    assert await effects.record_steps(late) == [first, late[1], late[2]]
    twice = [step(9, "a", b"1"), step(9, "b", b"2")]
    assert await effects.record_steps(twice) == [twice[0], twice[0]]
    found = await effects.steps([job, JobKey("u", "q", "j"), other, job])
    assert found == [[step(1, "one", b"[]"), first, late[1], twice[0]], [], [late[2]], found[0]]


async def test_an_unstorable_job_id_of_a_foreign_message_is_accepted(effects: EffectStore) -> None:
    odd = JobKey("t", "q", "nul\0half\ud800")
    step = Step(key=odd, position=1, name="s", result=b"1", attempt=1)
    (recorded,) = await effects.record_steps([step])
    assert [[recorded]] == await effects.steps([odd])
    (row,) = await effects.reserve([reservation(job_id=odd.job_id, worker="w\0")])
    assert row.state is RESERVED


async def test_concurrent_batches_in_any_order_do_not_deadlock(effects: EffectStore) -> None:
    reservations = [reservation(f"k{number}") for number in range(40)]
    await effects.reserve(reservations)
    outcomes = [outcome(each, DOUBT) for each in reservations]
    successors = [reservation(each.key, replaces_token=each.token) for each in reservations]
    calls = [effects.conclude(outcomes if number % 2 else outcomes[::-1]) for number in range(20)]
    reserve_calls = [effects.reserve(successors if number % 2 else successors[::-1]) for number in range(20)]
    async with asyncio.timeout(20):
        await asyncio.gather(*calls, *reserve_calls)
    assert {row.token for row in await effects.get([("t", each.key) for each in reservations]) if row} == {
        successor.token for successor in successors
    }
