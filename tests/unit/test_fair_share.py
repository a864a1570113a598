"""Fair share of tenants, without a store."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast.engine.port.jobs import MAX_TENANTS
from holdfast.engine.port.operators import TenantControl
from holdfast.engine.sqlite.claims import FairShare, Selection, TenantBacklog, select_tenants


def backlog(**counts: int) -> list[TenantBacklog]:
    return [TenantBacklog(0, tenant, count) for tenant, count in counts.items()]


def tenants(selection: Selection) -> list[str]:
    return [tenant for _, tenant in selection.parts]


def test_equal_tenants_alternate() -> None:
    assert tenants(select_tenants(backlog(a=3, b=9), 7, FairShare(), {}, {})) == ["a", "b", "a", "b", "a", "b", "b"]


@pytest.mark.parametrize("batch_size", [1, 3, 8, 40])
def test_shares_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    controls, fair_share, claims = {"a": TenantControl(weight=3)}, FairShare(), Counter[str]()
    while claims.total() < 40:
        selection = select_tenants(
            backlog(a=100, b=100), min(batch_size, 40 - claims.total()), fair_share, controls, {}
        )
        claims.update(tenants(selection))
        fair_share = selection.fair_share
    assert claims == {"a": 30, "b": 10}


def test_an_idle_tenant_accumulates_no_share() -> None:
    fair_share = select_tenants(backlog(a=1000), 1000, FairShare(), {}, {}).fair_share
    assert tenants(select_tenants(backlog(a=10, b=10), 4, fair_share, {}, {})) in (
        ["b", "a", "b", "a"],
        ["b", "a", "a", "b"],
    )
    # Conversely, claims made while no other tenant had jobs are not held against a tenant.
    next_selection = select_tenants(backlog(a=10, b=10), 20, fair_share, {}, {})
    assert Counter(tenants(next_selection)) == {"a": 10, "b": 10}
    assert Counter(tenants(next_selection)[:10])["a"] >= 4


def test_priorities_are_claimed_in_reading_order() -> None:
    parts = [TenantBacklog(0, "b", 2), TenantBacklog(1, "a", 5), TenantBacklog(1, "b", 5)]
    selection = select_tenants(parts, 6, FairShare(), {}, {})
    assert selection.parts[:2] == [(0, "b"), (0, "b")]
    # The tenant that had the high-priority claims is ahead for a while.
    assert selection.parts[2:4] == [(1, "a"), (1, "a")]


def test_a_tenant_gets_no_more_than_its_concurrency() -> None:
    controls = {"a": TenantControl(concurrency=3)}
    selection = select_tenants(backlog(a=10, b=3), 10, FairShare(), controls, {"a": 1})
    assert Counter(tenants(selection)) == {"a": 2, "b": 3}
    assert selection.capped
    over_limit = select_tenants(backlog(a=10), 10, FairShare(), controls, {"a": 7})
    assert (over_limit.parts, over_limit.capped, over_limit.fair_share) == ([], True, FairShare())
    assert not select_tenants(backlog(a=2), 10, FairShare(), controls, {}).capped


def test_the_kept_shares_are_bounded() -> None:
    parts = [TenantBacklog(0, f"t{number:04}", 1) for number in range(10 * MAX_TENANTS)]
    fair_share = select_tenants(parts, len(parts), FairShare(), {}, {}).fair_share
    assert len(fair_share.ahead) <= 4 * MAX_TENANTS
