"""Tokens: shown once, stored as a hash, and one error message for every invalid token (requirement H6)."""

from __future__ import annotations

import hashlib
import hmac
import logging
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text as sql

from holdfast.core.principal import ALL_TENANTS, Role
from holdfast.errors import Conflict, Forbidden, InvalidOption, NameNotDistinct, NotFound, Unauthorized
from holdfast.execution.backend import backend_of
from holdfast.operations.access import CACHE_S, TokenOperations
from holdfast.testing import ManualClock
from tests.operations.deployment import ADA, ADMIN, APPROVER, LOCAL, VIEWER, SampleDeployment, principal

DAY = timedelta(days=1)


class ManualMonotonic:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def get_tokens(
    deployment: SampleDeployment, clock: ManualClock | None = None, ticks: ManualMonotonic | None = None
) -> TokenOperations:
    ledger = backend_of(deployment.app).ledger
    assert ledger is not None
    return TokenOperations(ledger, clock, ticks or ManualMonotonic())


async def read_rows(deployment: SampleDeployment) -> str:
    """All rows of tokens and of the audit log."""
    ledger = backend_of(deployment.app).ledger
    assert ledger is not None
    async with ledger.queries.engine.connect() as connection:
        rows = [
            *await connection.execute(sql("SELECT * FROM tokens")),
            *await connection.execute(sql("SELECT * FROM operator_events")),
        ]
    return repr(rows)


async def test_a_token_identifies_a_verified_principal(deployment: SampleDeployment) -> None:
    tokens = get_tokens(deployment)
    row, text = await tokens.create(ADMIN, name="ada", role=Role.OPERATOR, tenants=["globex", "acme", "acme"])
    assert text.startswith(f"hf_{row.token_id}_")
    principal = await tokens.verify(text)
    assert (principal.name, principal.role, principal.tenants, principal.verified) == (
        "ada",
        Role.OPERATOR,
        frozenset({"acme", "globex"}),
        True,
    )
    assert [listed.token_id for listed in await tokens.list(ADMIN)] == [row.token_id]
    assert tokens.state(row) == "valid"


async def test_local_access_to_the_stores_can_create_the_first_token(deployment: SampleDeployment) -> None:
    _, text = await get_tokens(deployment).create(LOCAL, name="ada", role=Role.ADMIN, tenants=[ALL_TENANTS])
    assert (await get_tokens(deployment).verify(text)).sees_all_tenants


async def test_only_the_hash_is_stored_and_the_secret_is_never_printed(
    deployment: SampleDeployment, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        tokens = get_tokens(deployment)
        row, text = await tokens.create(ADMIN, name="ada", role=Role.VIEWER, tenants=["acme"])
        secret = text.removeprefix(f"hf_{row.token_id}_")
        await tokens.verify(text)
        with pytest.raises(Unauthorized) as refused:
            await tokens.verify(text + "x")
        await tokens.revoke(ADMIN, row.token_id)
    rows = await read_rows(deployment)
    assert hashlib.sha256(secret.encode()).hexdigest() in rows
    assert secret not in rows
    for output in (str(refused.value), caplog.text, repr(row), repr(await tokens.list(ADMIN))):
        assert secret not in output
    assert row.secret_hash not in str(await deployment.audit_log("operator.token_create"))


async def test_malformed_tokens_are_refused(deployment: SampleDeployment) -> None:
    tokens = get_tokens(deployment)
    near = "hf_0123456789abcdef_" + "a" * 43
    for garbage in ("", "hf", "hf__", near[:-1], near, near + "a", near + "\n", "Bearer x", "hf_" + "é" * 60, "\x00"):
        with pytest.raises(Unauthorized):
            await tokens.verify(garbage)


async def test_every_invalid_token_has_the_same_error_message(deployment: SampleDeployment) -> None:
    clock = ManualClock()
    tokens = get_tokens(deployment, clock)
    revoked, of_revoked = await tokens.create(ADMIN, name="a", role=Role.VIEWER, tenants=["acme"])
    await tokens.revoke(ADMIN, revoked.token_id, reason="laptop lost")
    expiring, of_expired = await tokens.create(ADMIN, name="b", role=Role.VIEWER, tenants=["acme"], expires_in=DAY)
    good, of_good = await tokens.create(ADMIN, name="c", role=Role.VIEWER, tenants=["acme"])
    assert (await tokens.verify(of_expired)).name == "b"
    clock.advance(DAY)
    changed = of_good[:-1] + ("A" if of_good[-1] != "A" else "B")
    unknown = f"hf_{'0' * 16}_{of_good[-43:]}"
    messages = set()
    for text in (of_revoked, of_expired, changed, unknown, "nonsense"):
        with pytest.raises(Unauthorized) as refused:
            await tokens.verify(text)
        messages.add(str(refused.value))
    assert len(messages) == 1
    assert (await tokens.verify(of_good)).name == "c"
    states = {row.token_id: tokens.state(row) for row in await tokens.list(ADMIN)}
    assert states == {revoked.token_id: "revoked", expiring.token_id: "expired", good.token_id: "valid"}


async def test_secrets_are_compared_in_constant_time(
    deployment: SampleDeployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[str, str]] = []
    compare_digest = hmac.compare_digest

    def compare(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return compare_digest(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    tokens = get_tokens(deployment)
    row, text = await tokens.create(ADMIN, name="ada", role=Role.VIEWER, tenants=["acme"])
    await tokens.verify(text)
    with pytest.raises(Unauthorized):
        await tokens.verify(f"hf_{'0' * 16}_{text[-43:]}")
    assert compared[0] == (row.secret_hash, row.secret_hash)
    # An unknown token id is compared as well.
    assert compared[1][0] == row.secret_hash
    assert len(compared) == 2


async def test_a_revoked_token_is_refused_elsewhere_within_five_seconds(deployment: SampleDeployment) -> None:
    ticks = ManualMonotonic()
    here, there = get_tokens(deployment), get_tokens(deployment, ticks=ticks)
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


async def test_a_cached_token_expires_in_time(deployment: SampleDeployment) -> None:
    clock = ManualClock()
    tokens = get_tokens(deployment, clock)
    _, text = await tokens.create(
        ADMIN, name="ada", role=Role.VIEWER, tenants=["acme"], expires_in=timedelta(seconds=1)
    )  # fmt: skip
    await tokens.verify(text)
    clock.advance(timedelta(seconds=1))
    with pytest.raises(Unauthorized):
        await tokens.verify(text)


async def test_only_admins_create_list_and_revoke_tokens(deployment: SampleDeployment) -> None:
    tokens = get_tokens(deployment)
    row, _ = await tokens.create(ADMIN, name="ada", role=Role.VIEWER, tenants=["acme"])
    for actor in (VIEWER, ADA, APPROVER):
        with pytest.raises(Forbidden):
            await tokens.create(actor, name="x", role=Role.VIEWER, tenants=["acme"])
        with pytest.raises(Forbidden):
            await tokens.list(actor)
        with pytest.raises(Forbidden):
            await tokens.revoke(actor, row.token_id)


async def test_an_admin_grants_and_sees_only_its_own_tenants(deployment: SampleDeployment) -> None:
    tokens, acme_admin = get_tokens(deployment), principal("ali", Role.ADMIN, "acme")
    own, _ = await tokens.create(acme_admin, name="x", role=Role.VIEWER, tenants=["acme"])
    for tenants in (["globex"], ["acme", "globex"], [ALL_TENANTS]):
        with pytest.raises(Forbidden, match="cannot grant"):
            await tokens.create(acme_admin, name="x", role=Role.VIEWER, tenants=tenants)
    other, _ = await tokens.create(ADMIN, name="y", role=Role.VIEWER, tenants=["acme", "globex"])
    all_tenants, _ = await tokens.create(ADMIN, name="z", role=Role.VIEWER, tenants=[ALL_TENANTS])
    assert [row.token_id for row in await tokens.list(acme_admin)] == [own.token_id]
    for hidden in (other, all_tenants):
        with pytest.raises(NotFound):
            await tokens.revoke(acme_admin, hidden.token_id)
    await tokens.revoke(acme_admin, own.token_id)


async def test_a_token_is_revoked_once(deployment: SampleDeployment) -> None:
    tokens = get_tokens(deployment)
    row, _ = await tokens.create(ADMIN, name="ada", role=Role.VIEWER, tenants=["acme"])
    await tokens.revoke(ADMIN, row.token_id)
    with pytest.raises(Conflict):
        await tokens.revoke(ADMIN, row.token_id)
    with pytest.raises(NotFound):
        await tokens.revoke(ADMIN, "no-such-id")


async def test_invalid_options_are_refused(deployment: SampleDeployment) -> None:
    tokens = get_tokens(deployment)
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


async def test_creating_and_revoking_tokens_is_audited(deployment: SampleDeployment) -> None:
    tokens = get_tokens(deployment)
    row, _ = await tokens.create(ADMIN, name="ada", role=Role.VIEWER, tenants=["acme"])
    await tokens.revoke(ADMIN, row.token_id, reason="laptop lost")
    (made,) = await deployment.audit_log("operator.token_create")
    assert (made.actor, made.target, made.target_id, made.tenant_id) == ("root", "token", row.token_id, "acme")
    assert (made.before, made.after.value["name"], made.after.value["role"]) == (None, "ada", "viewer")
    (ended,) = await deployment.audit_log("operator.token_revoke")
    assert (ended.actor, ended.reason, ended.before.value["name"]) == ("root", "laptop lost", "ada")


@pytest.mark.parametrize("name", ["Boss", "BOSS", "\uff42oss", "bo\u017fs"])
async def test_a_name_that_differs_only_in_case_or_form_is_refused(deployment: SampleDeployment, name: str) -> None:
    tokens = get_tokens(deployment)
    first, _ = await tokens.create(ADMIN, name="boss", role=Role.ADMIN, tenants=["acme"])
    with pytest.raises(NameNotDistinct):
        await tokens.create(ADMIN, name=name, role=Role.ADMIN, tenants=["globex"])
    await tokens.revoke(ADMIN, first.token_id)
    with pytest.raises(NameNotDistinct):
        await tokens.create(ADMIN, name=name, role=Role.ADMIN, tenants=["globex"])
    # The same name is the same principal: a token can be replaced.
    await tokens.create(ADMIN, name="boss", role=Role.ADMIN, tenants=["acme"])


@pytest.mark.parametrize("name", ["b\u043ess", "b\u03bfss", "\u0430\u03bf"])
async def test_a_name_that_mixes_scripts_with_look_alikes_is_refused(deployment: SampleDeployment, name: str) -> None:
    tokens = get_tokens(deployment)
    with pytest.raises(NameNotDistinct):
        await tokens.create(ADMIN, name=name, role=Role.ADMIN, tenants=["acme"])
    for fine in ("\u043e\u043b\u044f-2", "\u03bd\u03b9\u03ba\u03bf\u03c2", "yuki.\u96ea", "zo\u00eb"):
        await tokens.create(ADMIN, name=fine, role=Role.ADMIN, tenants=["acme"])
