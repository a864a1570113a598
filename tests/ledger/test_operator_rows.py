"""What a feed means for people, in the tables: questions, operators' deeds, kinds of errors, webhooks."""

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
from tests.ledger.projection_rig import Feed, Scribe, check_ledger, decode, job, open_ledger, rows, story

_S = State
CONSENT = {"approval_id": "a1", "by": ["ann"], "at_ms": 5}


@pytest.fixture(params=["sqlite", "postgres", "postgres, looked up"])
async def ledger(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Ledger]:
    """PostgreSQL has two ways to write a batch; a SQLite file always looks up."""
    if request.param == "postgres, looked up":

        def refuse(*_: Any) -> Any:
            raise ValueError("look it up")

        monkeypatch.setattr("holdfast.ledger.postgres.projection.fold_optimistic", refuse)
    on_file = request.param == "sqlite"
    made = open_ledger(f"sqlite:///{tmp_path}/ledger.db" if on_file else request.getfixturevalue("postgres_url"))
    await made.open()
    yield made
    await made.close()


@pytest.fixture
def scribe(ledger: Ledger) -> Scribe:
    return Scribe(ledger)


def asking(approval_id: str = "a1", **more: Any) -> ApprovalRequest:
    return ApprovalRequest(approval_id=approval_id, payload_hash="hash", **more)


def held(feed: Feed, job_id: str, ask: ApprovalRequest, **more: Any) -> Event:
    return feed.created(job_id, hold=True, meta=msgspec.json.encode(Meta(approval_request=ask)).decode(), **more)


def asks_again(feed: Feed, job_id: str, ask: ApprovalRequest, attempt: int = 1) -> Event:
    data = {"message": "may I?", "approval_request": msgspec.to_builtins(ask)}
    return feed.event(job_id, _S.RUNNING, _S.WAITING_APPROVAL, attempt, worker="w1", data=data)


def leaves(feed: Feed, job_id: str, to: State, kind: str, attempt: int = 0, **data: Any) -> Event:
    given = {"actor": "ann", "reason": "because"} | data
    return feed.event(job_id, _S.WAITING_APPROVAL, to, attempt, type=kind, data=given)


async def approvals(ledger: Ledger) -> dict[str, dict[str, Any]]:
    found = await rows(ledger, "SELECT * FROM approvals")
    return {row["approval_id"]: row for row in found}


# Questions -----------------------------------------------------------------------------------------


async def test_a_held_submission_asks(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    ask = asking(
        policies=("big",),
        reason="5,000 EUR",
        quorum=2,
        deadline_at_ms=1_800_000_000_000,
        requested_by="ann",
        details={"a": 1},
    )
    await scribe.write(feed.entry(held(feed, "j1", ask), feed.created("j2", hold=True)))
    row = (await approvals(ledger))["a1"]
    assert (row["job_id"], row["queue"], row["job_type"], row["status"]) == ("j1", "default", "add", "requested")
    assert (row["payload_hash"], decode(row["policies"]), decode(row["details"])) == ("hash", ["big"], {"a": 1})
    assert (row["quorum"], row["reason"], row["requested_by"], row["name"]) == (2, "5,000 EUR", "ann", "")
    assert row["deadline"] is not None
    assert row["acked_at"] is None
    page = await ledger.queries.approvals()
    assert [one.approval_id for one in page.approvals] == ["a1"]
    assert await story(ledger, "j1") == ["approval.requested"]


async def test_a_running_job_asks_and_the_question_outlives_the_batch(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    await scribe.write(feed.entry(feed.created("j1"), feed.claimed("j1")))
    await scribe.write(feed.entry(asks_again(feed, "j1", asking(name="ship?"))))
    row = (await approvals(ledger))["a1"]
    assert (row["name"], row["status"]) == ("ship?", "requested")
    await ledger.operators.vote(None, "a1", actor="bob", approve=True, reason="")
    await scribe.write(feed.entry(leaves(feed, "j1", _S.QUEUED, "approval.approved", 1, consent=CONSENT)))
    row = (await approvals(ledger))["a1"]
    # As people left it: the engine's own word for it changes nothing, and upkeep marks it as told.
    assert (row["status"], row["decided_by"], row["acked_at"]) == ("approved", "bob", None)
    await check_ledger(ledger)


@pytest.mark.parametrize(
    ("to", "kind", "data", "status"),
    [
        (_S.CANCELLED, "task.cancelled", {}, "withdrawn"),
        (_S.QUEUED, "approval.withdrawn", {}, "withdrawn"),
        (_S.QUEUED, "approval.approved", {}, "withdrawn"),
        (_S.QUEUED, "approval.approved", {"approval": CONSENT}, "approved"),
        (_S.CANCELLED, "approval.rejected", {}, "rejected"),
        (_S.CANCELLED, "approval.expired", {}, "expired"),
    ],
)
@pytest.mark.parametrize("together", [True, False])
async def test_a_job_that_goes_on_closes_its_question(
    ledger: Ledger, scribe: Scribe, to: State, kind: str, data: dict[str, Any], status: str, together: bool
) -> None:
    feed = Feed()
    events = [held(feed, "j1", asking()), leaves(feed, "j1", to, kind, **data)]
    for batch in [events] if together else [[event] for event in events]:
        await scribe.write(feed.entry(*batch))
    row = (await approvals(ledger))["a1"]
    assert (row["status"], row["decided_by"], row["decision_reason"]) == (status, "ann", "because")
    assert row["acked_at"] is not None
    assert await ledger.operators.undelivered_approvals(10) == []


async def test_a_second_question_leaves_the_first_behind(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    life = [
        held(feed, "j1", asking("a1")),
        leaves(feed, "j1", _S.QUEUED, "approval.withdrawn"),
        feed.claimed("j1"),
        asks_again(feed, "j1", asking("a2")),
    ]
    await scribe.write(feed.entry(*life))
    assert {name: row["status"] for name, row in (await approvals(ledger)).items()} == {
        "a1": "withdrawn",
        "a2": "requested",
    }
    await check_ledger(ledger)


async def test_a_restored_job_still_asks(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    await scribe.write(feed.entry(held(feed, "j1", asking())))
    back = feed.event("j1", _S.WAITING_APPROVAL, _S.WAITING_APPROVAL, type="task.restored")
    await scribe.write(feed.entry(back))
    assert (await approvals(ledger))["a1"]["status"] == "requested"


async def test_after_a_fork_the_question_is_void(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    await scribe.write(feed.entry(held(feed, "j1", asking())))
    # The engine went on from an earlier point.
    await scribe.write(feed.entry(feed.claimed("j1")))
    assert await story(ledger, "j1") == ["approval.requested", FORKED_EVENT, "task.claimed"]
    assert (await approvals(ledger))["a1"]["status"] == "withdrawn"


async def test_a_question_that_nobody_can_read_holds_the_job_all_the_same(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    await scribe.write(feed.entry(feed.created("j1"), feed.claimed("j1"), feed.created("j2", hold=True, meta="{no")))
    odd = feed.event("j1", _S.RUNNING, _S.WAITING_APPROVAL, 1, data={"approval_request": {"quorum": "many"}})
    done = await scribe.write(feed.entry(odd))
    assert done.anomalies == 0
    assert (await job(ledger, "j1"))["state"] == "waiting_approval"
    assert await approvals(ledger) == {}


# Deeds ---------------------------------------------------------------------------------------------


def deed(feed: Feed, verb: str = "cancel", job_id: str = "j1", **more: Any) -> Event:
    data = {"actor": "ann", "reason": "why", "before": {"state": "queued"}, "after": {"state": "cancelled"}} | more
    return feed.event(job_id, None, None, type=f"operator.{verb}", data=data)


async def test_what_people_did_is_in_the_log_and_not_in_the_story(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    cancelled = feed.event("j1", _S.QUEUED, _S.CANCELLED, data={"actor": "ann", "reason": "why"})
    await scribe.write(feed.entry(feed.created("j1")))
    await scribe.write(feed.entry(cancelled, deed(feed), deed(feed, "pause", "", target="queue", target_id="default")))
    assert await story(ledger, "j1") == ["task.created", "task.cancelled"]
    assert (await job(ledger, "j1"))["last_seq"] == 2
    lines = {line.type: line for line in (await ledger.queries.audit_log()).entries}
    line = lines["operator.cancel"]
    assert (line.actor, line.reason, line.target, line.target_id, line.queue) == ("ann", "why", "job", "j1", "default")
    assert line.before is not None
    assert line.before.value == {"state": "queued"}
    assert (lines["operator.pause"].target, lines["operator.pause"].target_id) == ("queue", "default")
    assert not await rows(ledger, "SELECT * FROM anomalies")
    await check_ledger(ledger)


async def test_a_deed_is_written_once_however_often_it_is_told(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    same = feed.entry(feed.created("j1"), deed(feed), deed(feed))
    await scribe.write(same)
    first = await rows(ledger, "SELECT id FROM operator_events ORDER BY id")
    assert len(first) == 2
    # The feed is told again from the beginning (a fork): the jobs are anomalies, the deeds are the same.
    await rows_of_nothing(scribe)
    await scribe.write(same)
    assert await rows(ledger, "SELECT id FROM operator_events ORDER BY id") == first
    # The same deed at another place of the feed is another deed.
    await scribe.write(feed.entry(deed(feed)))
    assert len(await rows(ledger, "SELECT id FROM operator_events")) == 3


async def rows_of_nothing(scribe: Scribe) -> None:
    """Go on with an empty entry, so that the position moves."""
    await scribe.write(Feed("other").entry())


async def test_a_deed_with_odd_words_stops_nothing(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    odd = deed(feed, actor="a\0nn", reason="\ud800", before=["\0"], after={"x": "\ud800"})
    await scribe.write(feed.entry(feed.created("j1"), odd, *feed.life("j2")))
    assert await story(ledger, "j2") == ["task.created", "task.claimed", "task.succeeded"]
    ((row),) = await rows(ledger, "SELECT actor FROM operator_events")
    assert row["actor"] == "a\ufffdnn"


async def test_a_deed_upon_a_job_that_nobody_knows(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    done = await scribe.write(feed.entry(deed(feed, job_id="nobody")))
    assert done.anomalies == 0
    assert len(await rows(ledger, "SELECT id FROM operator_events")) == 1


# The rest ------------------------------------------------------------------------------------------


async def test_made_due_is_a_note_in_the_story(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    await scribe.write(feed.entry(feed.created("j1")))
    await scribe.write(feed.entry(feed.event("j1", None, None, type=EXPEDITED_EVENT, data={"actor": "ann"})))
    assert await story(ledger, "j1") == ["task.created", EXPEDITED_EVENT]
    assert (await job(ledger, "j1"))["state"] == "queued"


@pytest.mark.parametrize("together", [False, True])
async def test_a_job_that_was_made_due_waits_for_no_time_any_more(
    ledger: Ledger, scribe: Scribe, together: bool
) -> None:
    feed, later = Feed(), 1_800_000_000_000
    made = [
        feed.created("delayed", run_at_ms=later),
        feed.created("retried"),
        feed.created("plain"),
        feed.claimed("plain"),
    ]
    made += [feed.claimed("retried")]
    data = {"code": "E", "message": "m", "next_attempt_at_ms": later}
    made += [feed.event("retried", _S.RUNNING, _S.RETRYING, 1, 1, data=data)]
    due = [feed.event(name, None, None, type=EXPEDITED_EVENT) for name in ("delayed", "retried", "plain")]
    if together:
        await scribe.write(feed.entry(*made), feed.entry(*due))
    else:
        await scribe.write(feed.entry(*made))
        await scribe.write(feed.entry(*due))
    columns = "job_id, run_at, next_retry_at, updated_at"
    found = {row["job_id"]: row for row in await rows(ledger, f"SELECT {columns} FROM jobs")}
    delayed, retried, plain = (found[name] for name in ("delayed", "retried", "plain"))
    assert delayed["run_at"] == delayed["updated_at"]
    assert retried["next_retry_at"] == retried["updated_at"]
    # What waited for no time still has none.
    assert [delayed["next_retry_at"], retried["run_at"], plain["run_at"], plain["next_retry_at"]] == [None] * 4
    await scribe.write(feed.entry(feed.event("delayed", None, None, type=EXPEDITED_EVENT), feed.claimed("delayed")))
    assert (await job(ledger, "delayed"))["run_at"] == delayed["run_at"]


async def test_a_webhook_is_in_the_jobs_row(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    meta = msgspec.json.encode(Meta(webhook="https://example.com/hook")).decode()
    await scribe.write(
        feed.entry(feed.created("j1", meta=meta), feed.created("j2"), feed.created("j3", meta='"webhook"'))
    )
    assert [(await job(ledger, name))["webhook"] for name in ("j1", "j2", "j3")] == [
        "https://example.com/hook",
        None,
        None,
    ]


async def test_letters_of_the_same_kind_have_the_same_fingerprint(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    await scribe.write(feed.entry(*(feed.created(name) for name in ("j1", "j2")), *map(feed.claimed, ("j1", "j2"))))
    died = [feed.failed(name, _S.DLQ_PENDING, retries=0, message=f"row {name[1]}") for name in ("j1", "j2")]
    await scribe.write(feed.entry(*died))
    (group,) = await ledger.queries.dead_letter_groups()
    assert group.count == 2
    assert group.fingerprint == error_fingerprint("add", Failure("TASK_ERROR", "row 1", "ValueError"))


async def test_a_letter_that_is_told_again_keeps_its_fate(ledger: Ledger, scribe: Scribe) -> None:
    feed = Feed()
    await scribe.write(feed.entry(feed.created("j1"), feed.claimed("j1")))
    await scribe.write(feed.entry(feed.failed("j1", _S.DLQ_PENDING, retries=0, dlq_id="d1")))
    await ledger.operators.reserve_replay(None, "d1", actor="ann", reason="", payload=None)
    # The engine was wiped, and the job put back: the letter is to be told to it anew.
    again = feed.event("j1", _S.DLQ_PENDING, _S.DLQ_PENDING, 1, type="task.restored")
    await scribe.write(feed.entry(again))
    (letter,) = (await ledger.queries.dead_letters()).dead_letters
    assert (letter.status, letter.replay_count) == ("replayed", 1)
    assert len(await ledger.operators.unsubmitted_replays(10)) == 1


async def test_batches_without_people_cost_no_statement_more(
    ledger: Ledger, scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    on_postgres, on_file = asyncpg.Connection.execute, Transaction.execute

    async def count(connection: Any, query: str, *arguments: Any, **options: Any) -> str:
        ran.append(query)
        return await on_postgres(connection, query, *arguments, **options)

    def count_too(transaction: Any, query: str, *arguments: Any) -> Any:
        ran.append(query)
        return on_file(transaction, query, *arguments)

    monkeypatch.setattr(asyncpg.Connection, "execute", count)
    monkeypatch.setattr(Transaction, "execute", count_too)
    feed = Feed()
    await scribe.write(feed.entry(*feed.life("j1")))
    assert not [query for query in ran if "approvals" in query or "operator_events" in query]
    await scribe.write(feed.entry(held(feed, "j2", asking()), deed(feed)))
    assert len([query for query in ran if "approvals" in query or "operator_events" in query]) == 2
