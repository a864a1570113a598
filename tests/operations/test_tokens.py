"""Tokens: made once, kept as a hash, the same answer to whoever has none (requirement H6)."""

from __future__ import annotations

import hashlib
import hmac
import logging
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text as sql

from holdfast.core.principal import ALL_TENANTS, Role
from holdfast.errors import Conflict, Forbidden, InvalidOption, NotFound, Unauthorized
from holdfast.execution.backend import backend_of
from holdfast.operations.access import CACHE_S, TokenOperations
from holdfast.testing import ManualClock
from tests.operations.deployment import ADA, ADMIN, APPROVER, LOCAL, VIEWER, World, person

DAY = timedelta(days=1)


class Ticks:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def office(world: World, clock: ManualClock | None = None, ticks: Ticks | None = None) -> TokenOperations:
    ledger = backend_of(world.app).ledger
    assert ledger is not None
    return TokenOperations(ledger, clock, ticks or Ticks())


async def everything(world: World) -> str:
    """All that the ledger has of tokens and what people did."""
    ledger = backend_of(world.app).ledger
    assert ledger is not None
    async with ledger.queries.engine.connect() as connection:
        rows = [
            *await connection.execute(sql("SELECT * FROM tokens")),
            *await connection.execute(sql("SELECT * FROM operator_events")),
        ]
    return repr(rows)


async def test_a_token_says_who_someone_is(world: World) -> None:
    tokens = office(world)
    row, text = await tokens.create(ADMIN, name="ada", role=Role.OPERATOR, tenants=["globex", "acme", "acme"])
    assert text.startswith(f"hf_{row.token_id}_")
    someone = await tokens.verify(text)
    assert (someone.name, someone.role, someone.tenants, someone.verified) == (
        "ada",
        Role.OPERATOR,
        frozenset({"acme", "globex"}),
        True,
    )
    assert [listed.token_id for listed in await tokens.list(ADMIN)] == [row.token_id]
    assert tokens.state(row) == "valid"


async def test_who_holds_the_stores_can_make_the_first_token(world: World) -> None:
    _, text = await office(world).create(LOCAL, name="ada", role=Role.ADMIN, tenants=[ALL_TENANTS])
    assert (await office(world).verify(text)).sees_all_tenants


async def test_only_the_hash_is_kept_and_nothing_tells_the_secret(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        tokens = office(world)
        row, text = await tokens.create(ADMIN, name="ada", role=Role.VIEWER, tenants=["acme"])
        secret = text.removeprefix(f"hf_{row.token_id}_")
        await tokens.verify(text)
        with pytest.raises(Unauthorized) as refused:
            await tokens.verify(text + "x")
        await tokens.revoke(ADMIN, row.token_id)
    kept = await everything(world)
    assert hashlib.sha256(secret.encode()).hexdigest() in kept
    assert secret not in kept
    for told in (str(refused.value), caplog.text, repr(row), repr(await tokens.list(ADMIN))):
        assert secret not in told
    assert row.secret_hash not in str(await world.log("operator.token_create"))


async def test_garbage_is_refused(world: World) -> None:
    tokens = office(world)
    near = "hf_0123456789abcdef_" + "a" * 43
    for garbage in ("", "hf", "hf__", near[:-1], near, near + "a", near + "\n", "Bearer x", "hf_" + "é" * 60, "\x00"):
        with pytest.raises(Unauthorized):
            await tokens.verify(garbage)


async def test_whatever_is_wrong_the_answer_is_the_same(world: World) -> None:
    clock = ManualClock()
    tokens = office(world, clock)
    revoked, of_revoked = await tokens.create(ADMIN, name="a", role=Role.VIEWER, tenants=["acme"])
    await tokens.revoke(ADMIN, revoked.token_id, reason="laptop lost")
    expiring, of_expired = await tokens.create(ADMIN, name="b", role=Role.VIEWER, tenants=["acme"], expires_in=DAY)
    good, of_good = await tokens.create(ADMIN, name="c", role=Role.VIEWER, tenants=["acme"])
    assert (await tokens.verify(of_expired)).name == "b"
    clock.advance(DAY)
    changed = of_good[:-1] + ("A" if of_good[-1] != "A" else "B")
    stranger = f"hf_{'0' * 16}_{of_good[-43:]}"
    said = set()
    for text in (of_revoked, of_expired, changed, stranger, "nonsense"):
        with pytest.raises(Unauthorized) as refused:
            await tokens.verify(text)
        said.add(str(refused.value))
    assert len(said) == 1
    assert (await tokens.verify(of_good)).name == "c"
    states = {row.token_id: tokens.state(row) for row in await tokens.list(ADMIN)}
    assert states == {revoked.token_id: "revoked", expiring.token_id: "expired", good.token_id: "valid"}


async def test_secrets_are_compared_in_constant_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []
    honest = hmac.compare_digest

    def compare(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return honest(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    tokens = office(world)
    row, text = await tokens.create(ADMIN, name="ada", role=Role.VIEWER, tenants=["acme"])
    await tokens.verify(text)
    with pytest.raises(Unauthorized):
        await tokens.verify(f"hf_{'0' * 16}_{text[-43:]}")
    assert compared[0] == (row.secret_hash, row.secret_hash)
    # Where there is no token there is a comparison all the same.
    assert compared[1][0] == row.secret_hash
    assert len(compared) == 2


async def test_a_revoked_token_is_refused_elsewhere_within_five_seconds(world: World) -> None:
    ticks = Ticks()
    here, there = office(world), office(world, ticks=ticks)
    row, text = await here.create(ADMIN, name="ada", role=Role.VIEWER, tenants=["acme"])
    await here.verify(text)
    await there.verify(text)
    await here.revoke(ADMIN, row.token_id)
    with pytest.raises(Unauthorized):
        await here.verify(text)
    assert CACHE_S <= 5
    ticks.now = CACHE_S
    with pytest.raises(Unauthorized):
        await there.verify(text)


async def test_a_token_that_was_just_seen_still_expires_in_time(world: World) -> None:
    clock = ManualClock()
    tokens = office(world, clock)
    _, text = await tokens.create(
        ADMIN, name="ada", role=Role.VIEWER, tenants=["acme"], expires_in=timedelta(seconds=1)
    )  # fmt: skip
    await tokens.verify(text)
    clock.advance(timedelta(seconds=1))
    with pytest.raises(Unauthorized):
        await tokens.verify(text)


async def test_only_admins_make_list_and_revoke_tokens(world: World) -> None:
    tokens = office(world)
    row, _ = await tokens.create(ADMIN, name="ada", role=Role.VIEWER, tenants=["acme"])
    for someone in (VIEWER, ADA, APPROVER):
        with pytest.raises(Forbidden):
            await tokens.create(someone, name="x", role=Role.VIEWER, tenants=["acme"])
        with pytest.raises(Forbidden):
            await tokens.list(someone)
        with pytest.raises(Forbidden):
            await tokens.revoke(someone, row.token_id)


async def test_an_admin_of_some_tenants_gives_away_no_others_and_sees_no_others(world: World) -> None:
    tokens, of_acme = office(world), person("ali", Role.ADMIN, "acme")
    own, _ = await tokens.create(of_acme, name="x", role=Role.VIEWER, tenants=["acme"])
    for tenants in (["globex"], ["acme", "globex"], [ALL_TENANTS]):
        with pytest.raises(Forbidden, match="cannot grant"):
            await tokens.create(of_acme, name="x", role=Role.VIEWER, tenants=tenants)
    other, _ = await tokens.create(ADMIN, name="y", role=Role.VIEWER, tenants=["acme", "globex"])
    whole, _ = await tokens.create(ADMIN, name="z", role=Role.VIEWER, tenants=[ALL_TENANTS])
    assert [row.token_id for row in await tokens.list(of_acme)] == [own.token_id]
    for hidden in (other, whole):
        with pytest.raises(NotFound):
            await tokens.revoke(of_acme, hidden.token_id)
    await tokens.revoke(of_acme, own.token_id)


async def test_a_token_is_revoked_once(world: World) -> None:
    tokens = office(world)
    row, _ = await tokens.create(ADMIN, name="ada", role=Role.VIEWER, tenants=["acme"])
    await tokens.revoke(ADMIN, row.token_id)
    with pytest.raises(Conflict):
        await tokens.revoke(ADMIN, row.token_id)
    with pytest.raises(NotFound):
        await tokens.revoke(ADMIN, "nobody")


async def test_what_cannot_be_is_told(world: World) -> None:
    tokens = office(world)
    for name in ("", "local:root", "two words", "a" * 101, "a\n"):
        with pytest.raises(InvalidOption, match="name"):
            await tokens.create(ADMIN, name=name, role=Role.VIEWER, tenants=["acme"])
    for tenants in ([], [""], ["a\nb"], ["a" * 201]):
        with pytest.raises(InvalidOption, match="tenant"):
            await tokens.create(ADMIN, name="ada", role=Role.VIEWER, tenants=tenants)
    for expires_in in (timedelta(), timedelta(seconds=-1), timedelta(days=100_000)):
        with pytest.raises(InvalidOption, match="expires"):
            await tokens.create(ADMIN, name="ada", role=Role.VIEWER, tenants=["acme"], expires_in=expires_in)
    assert await tokens.list(ADMIN) == []


async def test_making_and_revoking_is_in_the_log(world: World) -> None:
    tokens = office(world)
    row, _ = await tokens.create(ADMIN, name="ada", role=Role.VIEWER, tenants=["acme"])
    await tokens.revoke(ADMIN, row.token_id, reason="laptop lost")
    (made,) = await world.log("operator.token_create")
    assert (made.actor, made.target, made.target_id, made.tenant_id) == ("root", "token", row.token_id, "acme")
    assert (made.before, made.after.value["name"], made.after.value["role"]) == (None, "ada", "viewer")
    (ended,) = await world.log("operator.token_revoke")
    assert (ended.actor, ended.reason, ended.before.value["name"]) == ("root", "laptop lost", "ada")
