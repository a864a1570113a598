"""Queries for operators: approvals, dead letters and the audit log, on every kind of ledger."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from holdfast.errors import InvalidOption, NotFound, UsageError
from holdfast.ledger.port.operators import ApprovalStatus, DeadLetterStatus
from holdfast.ledger.queries import operator_filters, paging
from holdfast.ledger.queries.operator_filters import ApprovalFilter, AuditFilter, DeadLetterFilter
from tests.ledger.conftest import AnyLedger
from tests.ledger.operator_rows import add_approval, add_audit_entries, add_dead_letter, minutes

A, L = ApprovalStatus, DeadLetterStatus


# Approvals -----------------------------------------------------------------------------------------


async def _add_approvals(ledger: AnyLedger) -> None:
    decided = {"decided_at": minutes(1)}
    await add_approval(ledger, "a1", requested_at=minutes(9))
    await add_approval(ledger, "a2", requested_at=minutes(8), status="approved", **decided, queue="mail")
    await add_approval(ledger, "a3", requested_at=minutes(7), status="rejected", **decided, job_type="send")
    await add_approval(ledger, "a4", requested_at=minutes(6), job_id="job-a1")
    await add_approval(ledger, "a5", requested_at=minutes(5), tenant_id="acme", policies='["big", "night"]')


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (ApprovalFilter(), ["a5", "a4", "a3", "a2", "a1"]),
        (ApprovalFilter(statuses=frozenset({A.REQUESTED})), ["a5", "a4", "a1"]),
        (ApprovalFilter(statuses=frozenset({A.APPROVED, A.REJECTED, A.EXPIRED})), ["a3", "a2"]),
        (ApprovalFilter(tenants=["acme"]), ["a5"]),
        (ApprovalFilter(tenants=["acme", "default"]), ["a5", "a4", "a3", "a2", "a1"]),
        (ApprovalFilter(tenants=[]), []),
        (ApprovalFilter(tenants=["unknown"]), []),
        (ApprovalFilter(job_type="send"), ["a3"]),
        (ApprovalFilter(queues=frozenset({"mail"})), ["a2"]),
        (ApprovalFilter(job_id="job-a1"), ["a4", "a1"]),
        (ApprovalFilter(job_id="job-a2", statuses=frozenset({A.REQUESTED})), []),
        (ApprovalFilter(since=minutes(8), until=minutes(6)), ["a3", "a2"]),
    ],
)
async def test_approvals_are_listed_by_filter(
    any_ledger: AnyLedger, filters: ApprovalFilter, expected: list[str]
) -> None:
    await _add_approvals(any_ledger)
    page = await any_ledger.queries.approvals(filters)
    assert [row.approval_id for row in page.approvals] == expected
    assert page.cursor is None
    one_by_one = await _pages(lambda cursor: any_ledger.queries.approvals(filters, 1, cursor), "approvals")
    assert [row.approval_id for row in one_by_one] == expected


async def test_an_approval_has_its_votes(any_ledger: AnyLedger) -> None:
    await add_approval(any_ledger, "a", quorum=3)
    for name in ("zoe", "ann"):
        await any_ledger.operators.vote(None, "a", actor=name, approve=True, reason="ok")
    row = await any_ledger.queries.approval(None, "a")
    assert [vote.voter for vote in row.votes] == ["zoe", "ann"]
    (listed,) = (await any_ledger.queries.approvals()).approvals
    assert listed == row


async def test_approvals_of_other_tenants_are_not_visible(any_ledger: AnyLedger) -> None:
    await add_approval(any_ledger, "a", tenant_id="acme")
    assert (await any_ledger.queries.approval(["acme"], "a")).tenant_id == "acme"
    for tenants in (["default"], []):
        with pytest.raises(NotFound):
            await any_ledger.queries.approval(tenants, "a")


# Dead letters --------------------------------------------------------------------------------------


async def _add_dead_letters(ledger: AnyLedger) -> None:
    await add_dead_letter(ledger, "d1", failed_at=minutes(9), error="100% Wrong_answer")
    await add_dead_letter(ledger, "d2", failed_at=minutes(8), queue="mail", error_code="TIMEOUT", fingerprint="slow")
    await add_dead_letter(ledger, "d3", failed_at=minutes(7), status="replayed", replay_count=1)
    await add_dead_letter(ledger, "d4", failed_at=minutes(6), job_type="send", fingerprint="slow", error="wrong answer")
    await add_dead_letter(ledger, "d5", failed_at=minutes(5), tenant_id="acme")


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (DeadLetterFilter(), ["d5", "d4", "d3", "d2", "d1"]),
        (DeadLetterFilter(statuses=frozenset({L.OPEN})), ["d5", "d4", "d2", "d1"]),
        (DeadLetterFilter(statuses=frozenset({L.REPLAYED, L.DISCARDED})), ["d3"]),
        (DeadLetterFilter(tenants=["acme"]), ["d5"]),
        (DeadLetterFilter(tenants=("default", "acme"), job_type="send"), ["d4"]),
        (DeadLetterFilter(tenants=[]), []),
        (DeadLetterFilter(queues=frozenset({"mail"})), ["d2"]),
        (DeadLetterFilter(error_code="TIMEOUT"), ["d2"]),
        (DeadLetterFilter(fingerprint="slow"), ["d4", "d2"]),
        (DeadLetterFilter(fingerprint="slow", text="WRONG"), ["d4"]),
        (DeadLetterFilter(text="100%"), ["d1"]),
        (DeadLetterFilter(text="wrong_answer"), ["d1"]),
        (DeadLetterFilter(text="a\0b", job_type="\ud800"), []),
        (DeadLetterFilter(since=minutes(8), until=minutes(6)), ["d3", "d2"]),
    ],
)
async def test_dead_letters_are_listed_by_filter(
    any_ledger: AnyLedger, filters: DeadLetterFilter, expected: list[str]
) -> None:
    await _add_dead_letters(any_ledger)
    page = await any_ledger.queries.dead_letters(filters)
    assert [row.dlq_id for row in page.dead_letters] == expected
    assert page.cursor is None
    one_by_one = await _pages(lambda cursor: any_ledger.queries.dead_letters(filters, 1, cursor), "dead_letters")
    assert [row.dlq_id for row in one_by_one] == expected
    assert await any_ledger.queries.dead_letter_count(filters) == len(expected)
    assert sum(group.count for group in await any_ledger.queries.dead_letter_groups(filters)) == len(expected)


async def test_a_dead_letter_has_all_its_fields(any_ledger: AnyLedger) -> None:
    await add_dead_letter(any_ledger, "d", stack="Traceback …", history='[{"number": 1}]', job={})
    dead_letter = await any_ledger.queries.dead_letter(None, "d")
    assert (dead_letter.stack, dead_letter.history.value, dead_letter.payload.value) == (
        "Traceback …",
        [{"number": 1}],
        {"amount": 1},
    )
    assert (dead_letter.status, dead_letter.replay_count, dead_letter.fingerprint) == (L.OPEN, 0, "f")
    assert dead_letter.failed_at == minutes(10)
    assert dead_letter.events == []
    with pytest.raises(NotFound):
        await any_ledger.queries.dead_letter(["acme"], "d")
    with pytest.raises(NotFound):
        await any_ledger.queries.dead_letter(None, "e")


async def test_dead_letters_are_grouped_by_fingerprint(any_ledger: AnyLedger) -> None:
    await add_dead_letter(any_ledger, "d1", failed_at=minutes(9), error="boom 1")
    await add_dead_letter(any_ledger, "d2", failed_at=minutes(8), error="boom 2")
    await add_dead_letter(any_ledger, "d3", failed_at=minutes(7), error="boom 3", tenant_id="acme")
    await add_dead_letter(any_ledger, "d4", failed_at=minutes(6), fingerprint="other", error="x" * 10_000)
    first, second = await any_ledger.queries.dead_letter_groups()
    assert (first.fingerprint, first.count, first.first, first.last) == ("f", 3, minutes(9), minutes(7))
    assert first.error.startswith("boom")
    assert (second.fingerprint, second.count) == ("other", 1)
    assert len(second.error) < 1_000
    (group,) = await any_ledger.queries.dead_letter_groups(DeadLetterFilter(tenants=["acme"]))
    assert (group.count, group.first) == (1, minutes(7))


async def test_groups_count_the_newest_dead_letters(any_ledger: AnyLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_filters, "GROUPED", 2)
    for number in range(5):
        await add_dead_letter(any_ledger, f"d{number}", failed_at=minutes(number))
    (group,) = await any_ledger.queries.dead_letter_groups()
    assert (group.count, group.last) == (2, minutes(0))


# Audit log -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (AuditFilter(), ["e4", "e3", "e2", "e1"]),
        (AuditFilter(tenants=["acme"]), ["e4"]),
        (AuditFilter(tenants=["default", "unknown"]), ["e3", "e2", "e1"]),
        (AuditFilter(actor="bob"), ["e2"]),
        (AuditFilter(types=frozenset({"operator.pause", "operator.approve"})), ["e3"]),
        (AuditFilter(target="queue"), ["e3"]),
        (AuditFilter(target_id="j", queues=frozenset({"q"})), ["e1"]),
        (AuditFilter(since=minutes(3), until=minutes(1)), ["e3", "e2"]),
    ],
)
async def test_the_audit_log_is_listed_by_filter(
    any_ledger: AnyLedger, filters: AuditFilter, expected: list[str]
) -> None:
    await add_audit_entries(
        any_ledger,
        {"id": "e1", "at": minutes(4), "queue": "q", "before": '{"a":1}'},
        {"id": "e2", "at": minutes(3), "actor": "bob"},
        {"id": "e3", "at": minutes(2), "type": "operator.pause", "target": "queue", "target_id": "q"},
        {"id": "e4", "at": minutes(1), "tenant_id": "acme"},
    )
    page = await any_ledger.queries.audit_log(filters)
    assert [entry.id for entry in page.entries] == expected
    one_by_one = await _pages(lambda cursor: any_ledger.queries.audit_log(filters, 1, cursor), "entries")
    assert one_by_one == page.entries


async def test_an_audit_entry_is_typed(any_ledger: AnyLedger) -> None:
    await add_audit_entries(any_ledger, {"id": "e", "at": minutes(1), "before": '{"a":1}', "reason": "why"})
    (entry,) = (await any_ledger.queries.audit_log()).entries
    assert entry.before is not None
    assert (entry.before.value, entry.after, entry.reason, entry.at) == ({"a": 1}, None, "why", minutes(1))


# Pages ---------------------------------------------------------------------------------------------


async def _pages(read: Callable[[str | None], Awaitable[Any]], name: str) -> list[Any]:
    found: list[Any] = []
    cursor: str | None = None
    for _ in range(1_000):
        page = await read(cursor)
        found += getattr(page, name)
        cursor = page.cursor
        if cursor is None:
            return found
    raise AssertionError("the pages do not end")


async def test_pages_of_one_instant_and_many_tenants_lose_nothing(
    any_ledger: AnyLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same instant, same ids in several tenants, a filter without an index, and small scan limits."""
    monkeypatch.setattr(paging, "SCANNED", 6)
    monkeypatch.setattr(paging, "SCANNED_EACH", 2)
    expected: list[dict[str, Any]] = [
        {"tenant_id": tenant, "actor": "bob" if number % 3 else "ann", "at": minutes(number // 4), "id": f"e{number}"}
        for number in range(8)
        for tenant in ("acme", "default", "zeta")
    ]
    await add_audit_entries(any_ledger, *random.Random(7).sample(expected, len(expected)))
    for size in (1, 2, 5):
        read = partial(any_ledger.queries.audit_log, AuditFilter(actor="ann"), size)
        found = await _pages(read, "entries")
        expected_keys = sorted(
            ((row["at"], row["id"], row["tenant_id"]) for row in expected if row["actor"] == "ann"), reverse=True
        )
        assert [(entry.at, entry.id, entry.tenant_id) for entry in found] == expected_keys


@pytest.mark.parametrize("cursor", ["x", "AAAA", "é", "1-61", "1-61-62-63", "99999999999999999999-61-62", "1-6-62"])
async def test_an_invalid_cursor_is_refused(any_ledger: AnyLedger, cursor: str) -> None:
    queries = any_ledger.queries
    for read in (queries.dead_letters, queries.approvals, queries.audit_log):
        with pytest.raises(UsageError, match="not a cursor"):
            await read(None, 5, cursor)


async def test_limits_and_instants_are_checked(any_ledger: AnyLedger) -> None:
    queries = any_ledger.queries
    for read in (queries.dead_letters, queries.approvals, queries.audit_log):
        for limit in (0, -1, 1_001):
            with pytest.raises(InvalidOption):
                await read(None, limit)
    for kind in (DeadLetterFilter, ApprovalFilter, AuditFilter):
        with pytest.raises(InvalidOption, match="time zone"):
            kind(since=minutes(1).replace(tzinfo=None))


def test_a_filter_is_limited_to_permitted_tenants() -> None:
    for kind in (DeadLetterFilter, ApprovalFilter, AuditFilter):
        assert kind().limited_to(None).tenants is None
        assert kind().limited_to(("a",)).tenants == ("a",)
        assert kind(tenants=("a", "b")).limited_to(None).tenants == ("a", "b")
        assert kind(tenants=("a", "b")).limited_to(("b", "c")).tenants == ["b"]
        assert kind(tenants=("a",)).limited_to(("b",)).tenants == []
