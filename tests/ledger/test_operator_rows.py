"""Rows that a feed leaves for operators: approvals, audit entries, error fingerprints, webhooks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest

from holdfast.core.job import ApprovalRequest, Event, Failure, Meta
from holdfast.core.states import EXPEDITED_EVENT, FORKED_EVENT, State
from holdfast.core.text import error_fingerprint
from holdfast.ledger.port.ledger import Ledger
from holdfast.sqlite.transaction import Transaction
from tests.ledger.projection_rig import Feed, FeedWriter, check_ledger, decode, event_types, job, open_ledger, rows

_S = State
APPROVAL = {"approval_id": "a1", "by": ["ann"], "at_ms": 5}


@pytest.fixture(params=["sqlite", "postgres", "postgres, read first"])
async def ledger(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Ledger]:
    """PostgreSQL has two ways to write a batch; a SQLite file always reads the jobs first."""
    if request.param == "postgres, read first":

        def refuse(*_: Any) -> Any:
            raise ValueError("read first")

        monkeypatch.setattr("holdfast.ledger.postgres.projection.fold_optimistic", refuse)
    on_file = request.param == "sqlite"
    ledger = open_ledger(f"sqlite:///{tmp_path}/ledger.db" if on_file else request.getfixturevalue("postgres_url"))
    await ledger.open()
    yield ledger
    await ledger.close()


@pytest.fixture
def writer(ledger: Ledger) -> FeedWriter:
    return FeedWriter(ledger)


def approval_request(approval_id: str = "a1", **more: Any) -> ApprovalRequest:
    return ApprovalRequest(approval_id=approval_id, payload_hash="hash", **more)


def held_event(feed: Feed, job_id: str, request: ApprovalRequest, **more: Any) -> Event:
    return feed.created(job_id, hold=True, meta=msgspec.json.encode(Meta(approval_request=request)).decode(), **more)


def request_event(feed: Feed, job_id: str, request: ApprovalRequest, attempt: int = 1) -> Event:
    data = {"message": "may I?", "approval_request": msgspec.to_builtins(request)}
    return feed.event(job_id, _S.RUNNING, _S.WAITING_APPROVAL, attempt, worker="w1", data=data)


def decision_event(feed: Feed, job_id: str, to_state: State, event_type: str, attempt: int = 0, **data: Any) -> Event:
    fields = {"actor": "ann", "reason": "because"} | data
    return feed.event(job_id, _S.WAITING_APPROVAL, to_state, attempt, type=event_type, data=fields)


async def approvals(ledger: Ledger) -> dict[str, dict[str, Any]]:
    found = await rows(ledger, "SELECT * FROM approvals")
    return {row["approval_id"]: row for row in found}


# Approval requests ---------------------------------------------------------------------------------


async def test_a_held_submission_has_an_approval_row(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    request = approval_request(
        policies=("big",),
        reason="5,000 EUR",
        quorum=2,
        deadline_at_ms=1_800_000_000_000,
        requested_by="ann",
        details={"a": 1},
    )
    await writer.write(feed.entry(held_event(feed, "j1", request), feed.created("j2", hold=True)))
    row = (await approvals(ledger))["a1"]
    assert (row["job_id"], row["queue"], row["job_type"], row["status"]) == ("j1", "default", "add", "requested")
    assert (row["payload_hash"], decode(row["policies"]), decode(row["details"])) == ("hash", ["big"], {"a": 1})
    assert (row["quorum"], row["reason"], row["requested_by"], row["name"]) == (2, "5,000 EUR", "ann", "")
    assert row["deadline"] is not None
    assert row["acked_at"] is None
    page = await ledger.queries.approvals()
    assert [approval.approval_id for approval in page.approvals] == ["a1"]
    assert await event_types(ledger, "j1") == ["approval.requested"]


async def test_a_vote_is_not_changed_by_the_event_of_its_delivery(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    await writer.write(feed.entry(feed.created("j1"), feed.claimed("j1")))
    await writer.write(feed.entry(request_event(feed, "j1", approval_request(name="ship?"))))
    row = (await approvals(ledger))["a1"]
    assert (row["name"], row["status"]) == ("ship?", "requested")
    await ledger.operators.vote(None, "a1", actor="bob", approve=True, reason="")
    await writer.write(feed.entry(decision_event(feed, "j1", _S.QUEUED, "approval.approved", 1, consent=APPROVAL)))
    row = (await approvals(ledger))["a1"]
    # The vote stands: the engine's event does not change it, and upkeep marks it as delivered.
    assert (row["status"], row["decided_by"], row["acked_at"]) == ("approved", "bob", None)
    await check_ledger(ledger)


@pytest.mark.parametrize(
    ("to_state", "event_type", "data", "status"),
    [
        (_S.CANCELLED, "task.cancelled", {}, "withdrawn"),
        (_S.QUEUED, "approval.withdrawn", {}, "withdrawn"),
        (_S.QUEUED, "approval.approved", {}, "withdrawn"),
        (_S.QUEUED, "approval.approved", {"approval": APPROVAL}, "approved"),
        (_S.CANCELLED, "approval.rejected", {}, "rejected"),
        (_S.CANCELLED, "approval.expired", {}, "expired"),
    ],
)
@pytest.mark.parametrize("together", [True, False])
async def test_a_job_that_stops_waiting_closes_its_request(
    ledger: Ledger,
    writer: FeedWriter,
    to_state: State,
    event_type: str,
    data: dict[str, Any],
    status: str,
    together: bool,
) -> None:
    feed = Feed()
    events = [held_event(feed, "j1", approval_request()), decision_event(feed, "j1", to_state, event_type, **data)]
    for batch in [events] if together else [[event] for event in events]:
        await writer.write(feed.entry(*batch))
    row = (await approvals(ledger))["a1"]
    assert (row["status"], row["decided_by"], row["decision_reason"]) == (status, "ann", "because")
    assert row["acked_at"] is not None
    assert await ledger.operators.undelivered_approvals(10) == []


async def test_a_second_request_does_not_change_the_first(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    events = [
        held_event(feed, "j1", approval_request("a1")),
        decision_event(feed, "j1", _S.QUEUED, "approval.withdrawn"),
        feed.claimed("j1"),
        request_event(feed, "j1", approval_request("a2")),
    ]
    await writer.write(feed.entry(*events))
    assert {name: row["status"] for name, row in (await approvals(ledger)).items()} == {
        "a1": "withdrawn",
        "a2": "requested",
    }
    await check_ledger(ledger)


async def test_a_restored_job_keeps_its_open_request(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    await writer.write(feed.entry(held_event(feed, "j1", approval_request())))
    restored = feed.event("j1", _S.WAITING_APPROVAL, _S.WAITING_APPROVAL, type="task.restored")
    await writer.write(feed.entry(restored))
    assert (await approvals(ledger))["a1"]["status"] == "requested"


async def test_a_fork_withdraws_the_request(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    await writer.write(feed.entry(held_event(feed, "j1", approval_request())))
    # The engine continued from an earlier point.
    await writer.write(feed.entry(feed.claimed("j1")))
    assert await event_types(ledger, "j1") == ["approval.requested", FORKED_EVENT, "task.claimed"]
    assert (await approvals(ledger))["a1"]["status"] == "withdrawn"


async def test_an_unreadable_request_still_holds_the_job(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    await writer.write(feed.entry(feed.created("j1"), feed.claimed("j1"), feed.created("j2", hold=True, meta="{no")))
    odd = feed.event("j1", _S.RUNNING, _S.WAITING_APPROVAL, 1, data={"approval_request": {"quorum": "many"}})
    done = await writer.write(feed.entry(odd))
    assert done.anomalies == 0
    assert (await job(ledger, "j1"))["state"] == "waiting_approval"
    assert await approvals(ledger) == {}


# Audit entries -------------------------------------------------------------------------------------


def audit_event(feed: Feed, verb: str = "cancel", job_id: str = "j1", **more: Any) -> Event:
    data = {"actor": "ann", "reason": "why", "before": {"state": "queued"}, "after": {"state": "cancelled"}} | more
    return feed.event(job_id, None, None, type=f"operator.{verb}", data=data)


async def test_operator_events_are_in_the_audit_log_and_not_in_the_history(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    cancelled = feed.event("j1", _S.QUEUED, _S.CANCELLED, data={"actor": "ann", "reason": "why"})
    await writer.write(feed.entry(feed.created("j1")))
    await writer.write(
        feed.entry(cancelled, audit_event(feed), audit_event(feed, "pause", "", target="queue", target_id="default"))
    )
    assert await event_types(ledger, "j1") == ["task.created", "task.cancelled"]
    assert (await job(ledger, "j1"))["last_seq"] == 2
    entries = {entry.type: entry for entry in (await ledger.queries.audit_log()).entries}
    entry = entries["operator.cancel"]
    assert (entry.actor, entry.reason, entry.target, entry.target_id, entry.queue) == (
        "ann",
        "why",
        "job",
        "j1",
        "default",
    )
    assert entry.before is not None
    assert entry.before.value == {"state": "queued"}
    assert (entries["operator.pause"].target, entries["operator.pause"].target_id) == ("queue", "default")
    assert not await rows(ledger, "SELECT * FROM anomalies")
    await check_ledger(ledger)


async def test_an_audit_entry_is_written_once_when_the_feed_is_read_again(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    same = feed.entry(feed.created("j1"), audit_event(feed), audit_event(feed))
    await writer.write(same)
    first = await rows(ledger, "SELECT id FROM operator_events ORDER BY id")
    assert len(first) == 2
    # The feed is read again from its start (a fork): job events become anomalies, audit entries stay the same.
    await write_empty_entry(writer)
    await writer.write(same)
    assert await rows(ledger, "SELECT id FROM operator_events ORDER BY id") == first
    # The same operator event at another position of the feed is another audit entry.
    await writer.write(feed.entry(audit_event(feed)))
    assert len(await rows(ledger, "SELECT id FROM operator_events")) == 3


async def write_empty_entry(writer: FeedWriter) -> None:
    """Write an empty entry, so that the position moves."""
    await writer.write(Feed("other").entry())


async def test_an_audit_entry_with_unstorable_text_stops_nothing(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    odd = audit_event(feed, actor="a\0nn", reason="\ud800", before=["\0"], after={"x": "\ud800"})
    await writer.write(feed.entry(feed.created("j1"), odd, *feed.life("j2")))
    assert await event_types(ledger, "j2") == ["task.created", "task.claimed", "task.succeeded"]
    ((row),) = await rows(ledger, "SELECT actor FROM operator_events")
    assert row["actor"] == "a\ufffdnn"


async def test_an_audit_entry_of_an_unknown_job_is_recorded(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    done = await writer.write(feed.entry(audit_event(feed, job_id="unknown")))
    assert done.anomalies == 0
    assert len(await rows(ledger, "SELECT id FROM operator_events")) == 1


# Other rows ----------------------------------------------------------------------------------------


async def test_an_expedited_event_is_in_the_history(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    await writer.write(feed.entry(feed.created("j1")))
    await writer.write(feed.entry(feed.event("j1", None, None, type=EXPEDITED_EVENT, data={"actor": "ann"})))
    assert await event_types(ledger, "j1") == ["task.created", EXPEDITED_EVENT]
    assert (await job(ledger, "j1"))["state"] == "queued"


@pytest.mark.parametrize("together", [False, True])
async def test_an_expedited_job_is_due_now(ledger: Ledger, writer: FeedWriter, together: bool) -> None:
    feed, later = Feed(), 1_800_000_000_000
    events = [
        feed.created("delayed", run_at_ms=later),
        feed.created("retried"),
        feed.created("plain"),
        feed.claimed("plain"),
    ]
    events += [feed.claimed("retried")]
    data = {"code": "E", "message": "m", "next_attempt_at_ms": later}
    events += [feed.event("retried", _S.RUNNING, _S.RETRYING, 1, 1, data=data)]
    expedited = [feed.event(name, None, None, type=EXPEDITED_EVENT) for name in ("delayed", "retried", "plain")]
    if together:
        await writer.write(feed.entry(*events), feed.entry(*expedited))
    else:
        await writer.write(feed.entry(*events))
        await writer.write(feed.entry(*expedited))
    columns = "job_id, run_at, next_retry_at, updated_at"
    found = {row["job_id"]: row for row in await rows(ledger, f"SELECT {columns} FROM jobs")}
    delayed, retried, plain = (found[name] for name in ("delayed", "retried", "plain"))
    assert delayed["run_at"] == delayed["updated_at"]
    assert retried["next_retry_at"] == retried["updated_at"]
    # Jobs that waited for no time still have none.
    assert [delayed["next_retry_at"], retried["run_at"], plain["run_at"], plain["next_retry_at"]] == [None] * 4
    await writer.write(feed.entry(feed.event("delayed", None, None, type=EXPEDITED_EVENT), feed.claimed("delayed")))
    assert (await job(ledger, "delayed"))["run_at"] == delayed["run_at"]


async def test_the_webhook_is_in_the_jobs_row(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    meta = msgspec.json.encode(Meta(webhook="https://example.com/hook")).decode()
    await writer.write(
        feed.entry(feed.created("j1", meta=meta), feed.created("j2"), feed.created("j3", meta='"webhook"'))
    )
    assert [(await job(ledger, name))["webhook"] for name in ("j1", "j2", "j3")] == [
        "https://example.com/hook",
        None,
        None,
    ]


async def test_dead_letters_of_the_same_error_share_a_fingerprint(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    await writer.write(feed.entry(*(feed.created(name) for name in ("j1", "j2")), *map(feed.claimed, ("j1", "j2"))))
    failed_events = [feed.failed(name, _S.DLQ_PENDING, retries=0, message=f"row {name[1]}") for name in ("j1", "j2")]
    await writer.write(feed.entry(*failed_events))
    (group,) = await ledger.queries.dead_letter_groups()
    assert group.count == 2
    assert group.fingerprint == error_fingerprint("add", Failure("TASK_ERROR", "row 1", "ValueError"))


async def test_a_dead_letter_recorded_again_keeps_its_status(ledger: Ledger, writer: FeedWriter) -> None:
    feed = Feed()
    await writer.write(feed.entry(feed.created("j1"), feed.claimed("j1")))
    await writer.write(feed.entry(feed.failed("j1", _S.DLQ_PENDING, retries=0, dlq_id="d1")))
    await ledger.operators.reserve_replay(None, "d1", actor="ann", reason="", payload=None)
    # The engine was wiped and the job restored: the dead letter has to be confirmed again.
    again = feed.event("j1", _S.DLQ_PENDING, _S.DLQ_PENDING, 1, type="task.restored")
    await writer.write(feed.entry(again))
    (dead_letter,) = (await ledger.queries.dead_letters()).dead_letters
    assert (dead_letter.status, dead_letter.replay_count) == ("replayed", 1)
    assert len(await ledger.operators.unsubmitted_replays(10)) == 1


async def test_batches_without_operator_data_need_no_extra_statement(
    ledger: Ledger, writer: FeedWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries: list[str] = []
    on_postgres, on_file = asyncpg.Connection.execute, Transaction.execute

    async def count_postgres(connection: Any, query: str, *arguments: Any, **options: Any) -> str:
        queries.append(query)
        return await on_postgres(connection, query, *arguments, **options)

    def count_file(transaction: Any, query: str, *arguments: Any) -> Any:
        queries.append(query)
        return on_file(transaction, query, *arguments)

    monkeypatch.setattr(asyncpg.Connection, "execute", count_postgres)
    monkeypatch.setattr(Transaction, "execute", count_file)
    feed = Feed()
    await writer.write(feed.entry(*feed.life("j1")))
    assert not [query for query in queries if "approvals" in query or "operator_events" in query]
    await writer.write(feed.entry(held_event(feed, "j2", approval_request()), audit_event(feed)))
    assert len([query for query in queries if "approvals" in query or "operator_events" in query]) == 2
