"""What every store of effects and steps guarantees: PostgreSQL, a SQLite ledger, the embedded engine's file, memory."""

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


def wish(key: str = "k", **given: Any) -> Reservation:
    fields: dict[str, Any] = {
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
    return Reservation(**fields | given)


def end(wish: Reservation, state: EffectState | None, **given: Any) -> EffectOutcome:
    value = b"1" if state is DONE else None
    return EffectOutcome(
        **{"tenant_id": wish.tenant_id, "key": wish.key, "token": wish.token, "state": state, "value": value} | given
    )


async def test_the_first_to_reserve_has_the_key(effects: EffectStore) -> None:
    first, second = wish(job_id="one"), wish(job_id="two", attempt=3, worker="x")
    (held,) = await effects.reserve([first])
    assert (held.state, held.token, held.value, held.reason) == (RESERVED, first.token, None, "")
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


async def test_a_wish_that_is_sent_twice_is_one_reservation(effects: EffectStore) -> None:
    mine = wish()
    assert await effects.reserve([mine]) == await effects.reserve([mine])


async def test_a_key_belongs_to_a_tenant(effects: EffectStore) -> None:
    mine, theirs = wish(tenant_id="a"), wish(tenant_id="b")
    assert [held.token for held in await effects.reserve([mine, theirs])] == [mine.token, theirs.token]


async def test_a_key_twice_in_one_batch_has_one_winner(effects: EffectStore) -> None:
    wishes = [wish(), wish("other"), wish(), wish()]
    answers = await effects.reserve(wishes)
    assert [held.token for held in answers] == [wishes[0].token, wishes[1].token, wishes[0].token, wishes[0].token]


async def test_a_thousand_wishes_for_one_key_at_once_have_one_winner(effects: EffectStore) -> None:
    batches = [[wish(f"k{key}") for key in range(10)][:: 1 if batch % 2 else -1] for batch in range(100)]
    answers = await asyncio.gather(*map(effects.reserve, batches))
    holders: dict[str, set[str]] = {}
    for wishes, answer in zip(batches, answers, strict=True):
        for asked, held in zip(wishes, answer, strict=True):
            holders.setdefault(asked.key, set()).add(held.token)
    assert len(holders) == 10
    assert all(len(tokens) == 1 for tokens in holders.values()), holders


async def test_done_is_told_to_whoever_comes_later_and_does_not_change(effects: EffectStore) -> None:
    mine = wish()
    await effects.reserve([mine])
    value = '{"größe": 1, "n": 12345678901234567890, "empty": []}'.encode()
    assert await effects.conclude([end(mine, DONE, value=value)]) == [True]
    (held,) = await effects.reserve([wish()])
    assert (held.state, held.value, held.token) == (DONE, value, mine.token)
    # A second copy, or an end that is told late by the same holder, changes nothing.
    assert await effects.conclude([end(mine, DONE), end(mine, DOUBT), end(mine, None)]) == [True, True, True]
    assert await effects.get([("t", "k")]) == [held]


async def test_in_doubt_keeps_the_key_and_its_holder_may_resolve_it(effects: EffectStore) -> None:
    mine = wish()
    await effects.reserve([mine])
    assert await effects.conclude([end(mine, DOUBT, reason="nul \0 and \ud800 half")]) == [True]
    (held,) = await effects.reserve([wish()])
    assert (held.state, held.token) == (DOUBT, mine.token)
    assert held.reason.startswith("nul ")
    assert await effects.conclude([end(mine, DONE)]) == [True]
    (held,) = await effects.reserve([wish()])
    assert (held.state, held.value, held.reason) == (DONE, b"1", "")


async def test_not_done_frees_the_key(effects: EffectStore) -> None:
    mine, next_one = wish(), wish()
    await effects.reserve([mine])
    assert await effects.conclude([end(mine, None)]) == [True]
    assert await effects.get([("t", "k")]) == [None]
    # The reply was lost: told again.
    assert await effects.conclude([end(mine, None)]) == [True]
    (held,) = await effects.reserve([next_one])
    assert held.token == next_one.token
    assert await effects.conclude([end(mine, None)]) == [False]
    assert (await effects.get([("t", "k")]))[0] == held


@pytest.mark.parametrize("state", [RESERVED, DOUBT])
async def test_a_reservation_is_taken_over_by_its_token_and_its_first_holder_learns_it(
    effects: EffectStore, state: EffectState
) -> None:
    lost, other = wish(job_id="lost"), wish(job_id="other", replaces_token="another token")
    heir, late = wish(job_id="heir", replaces_token=lost.token), wish(job_id="late", replaces_token=lost.token)
    await effects.reserve([lost])
    if state is DOUBT:
        await effects.conclude([end(lost, DOUBT, reason="why")])
    assert (await effects.reserve([other]))[0].token == lost.token
    # A wish without a word about it does not take over because another one in its batch does.
    answers = await effects.reserve([wish(), heir, late])
    assert [held.token for held in answers] == [lost.token, heir.token, heir.token]
    assert (answers[1].state, answers[1].job_id, answers[1].reason) == (RESERVED, "heir", "")
    assert await effects.conclude([end(lost, DONE, value=b"2")]) == [False]
    assert await effects.conclude([end(heir, DONE, value=b"3")]) == [True]
    (held,) = await effects.reserve([wish(replaces_token=heir.token)])
    assert (held.state, held.value) == (DONE, b"3")


async def test_an_end_without_a_reservation_is_not_held(effects: EffectStore) -> None:
    assert await effects.conclude([end(wish(), DONE), end(wish(), DOUBT)]) == [False, False]
    assert await effects.get([("t", "k")]) == [None]


async def test_a_done_key_is_free_after_its_time_and_no_other_is(effects: EffectStore) -> None:
    short, long, doubt = wish("short"), wish("long"), wish("doubt")
    await effects.reserve([short, long, doubt])
    await effects.conclude([end(short, DONE, ttl_ms=1), end(long, DONE, ttl_ms=60_000), end(doubt, DOUBT, ttl_ms=1)])
    await asyncio.sleep(0.01)
    wishes = [wish("short"), wish("long"), wish("doubt")]
    answers = await effects.reserve(wishes)
    assert [held.token for held in answers] == [wishes[0].token, long.token, doubt.token]
    assert (answers[0].state, answers[0].value) == (RESERVED, None)


async def test_steps_come_back_by_position_and_the_first_to_record_wins(effects: EffectStore) -> None:
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


async def test_a_foreign_job_s_odd_id_does_no_harm(effects: EffectStore) -> None:
    odd = JobKey("t", "q", "nul\0half\ud800")
    step = Step(key=odd, position=1, name="s", result=b"1", attempt=1)
    (recorded,) = await effects.record_steps([step])
    assert [[recorded]] == await effects.steps([odd])
    (held,) = await effects.reserve([wish(job_id=odd.job_id, worker="w\0")])
    assert held.state is RESERVED


async def test_batches_that_meet_in_any_order_do_not_lock_each_other_out(effects: EffectStore) -> None:
    wishes = [wish(f"k{number}") for number in range(40)]
    await effects.reserve(wishes)
    forth = [end(one, DOUBT) for one in wishes]
    heirs = [wish(one.key, replaces_token=one.token) for one in wishes]
    calls = [effects.conclude(forth if number % 2 else forth[::-1]) for number in range(20)]
    takes = [effects.reserve(heirs if number % 2 else heirs[::-1]) for number in range(20)]
    async with asyncio.timeout(20):
        await asyncio.gather(*calls, *takes)
    assert {held.token for held in await effects.get([("t", one.key) for one in wishes]) if held} == {
        heir.token for heir in heirs
    }
