"""Whose turn it is, without a store."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast.engine.port.jobs import MAX_TENANTS
from holdfast.engine.port.operators import TenantControl
from holdfast.engine.sqlite.claims import FairShare, Selection, TenantBacklog, select_tenants


def line(**counts: int) -> list[TenantBacklog]:
    return [TenantBacklog(0, tenant, count) for tenant, count in counts.items()]


def names(picked: Selection) -> list[str]:
    return [tenant for _, tenant in picked.parts]


def test_equals_alternate() -> None:
    assert names(select_tenants(line(a=3, b=9), 7, FairShare(), {}, {})) == ["a", "b", "a", "b", "a", "b", "b"]


@pytest.mark.parametrize("at_a_time", [1, 3, 8, 40])
def test_shares_are_the_same_however_they_are_asked_for(at_a_time: int) -> None:
    controls, turns, served = {"a": TenantControl(weight=3)}, FairShare(), Counter[str]()
    while served.total() < 40:
        picked = select_tenants(line(a=100, b=100), min(at_a_time, 40 - served.total()), turns, controls, {})
        served.update(names(picked))
        turns = picked.fair_share
    assert served == {"a": 30, "b": 10}


def test_a_rest_saves_up_no_turns() -> None:
    turns = select_tenants(line(a=1000), 1000, FairShare(), {}, {}).fair_share
    assert names(select_tenants(line(a=10, b=10), 4, turns, {}, {})) in (["b", "a", "b", "a"], ["b", "a", "a", "b"])
    # The other way round: whoever had many alone is not held back for them.
    later = select_tenants(line(a=10, b=10), 20, turns, {}, {})
    assert Counter(names(later)) == {"a": 10, "b": 10}
    assert Counter(names(later)[:10])["a"] >= 4


def test_lines_go_in_the_order_of_reading() -> None:
    parts = [TenantBacklog(0, "b", 2), TenantBacklog(1, "a", 5), TenantBacklog(1, "b", 5)]
    picked = select_tenants(parts, 6, FairShare(), {}, {})
    assert picked.parts[:2] == [(0, "b"), (0, "b")]
    # Whoever had the urgent ones is ahead for a while.
    assert picked.parts[2:4] == [(1, "a"), (1, "a")] or picked.parts[2] == (1, "a")


def test_a_tenant_gets_no_more_than_its_places() -> None:
    controls = {"a": TenantControl(concurrency=3)}
    picked = select_tenants(line(a=10, b=3), 10, FairShare(), controls, {"a": 1})
    assert Counter(names(picked)) == {"a": 2, "b": 3}
    assert picked.capped
    over = select_tenants(line(a=10), 10, FairShare(), controls, {"a": 7})
    assert (over.parts, over.capped, over.fair_share) == ([], True, FairShare())
    assert not select_tenants(line(a=2), 10, FairShare(), controls, {}).capped


def test_only_so_many_are_remembered() -> None:
    parts = [TenantBacklog(0, f"t{number:04}", 1) for number in range(10 * MAX_TENANTS)]
    turns = select_tenants(parts, len(parts), FairShare(), {}, {}).fair_share
    assert len(turns.ahead) <= 4 * MAX_TENANTS
