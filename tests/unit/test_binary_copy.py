"""Rows in PostgreSQL's binary format have the same values as rows that a driver encodes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.core.job import Event
from holdfast.core.states import State
from holdfast.ledger.fold import JobDraft, fold_optimistic
from holdfast.ledger.fold_rows import JOB_COLUMNS, job_row
from holdfast.ledger.postgres.binary_copy import job_rows
from holdfast.schema import jobs

_EPOCH_2000_MS = 946_684_800_000


def created(job_id: str = "j1", **data: object) -> Event:
    data = {"task": "mail", "payload": '{"to":"é"}', "idempotency_key": job_id, "run_at_ms": 0, **data}
    return Event(type="job.created", job_id=job_id, tenant_id="t", at_ms=5_000, to_state=State.QUEUED, data=data)


def moved(job_id: str, from_state: State, to_state: State, **more: object) -> Event:
    event = Event(type="x", job_id=job_id, tenant_id="t", at_ms=6_000, from_state=from_state, to_state=to_state)
    return msgspec.structs.replace(event, **more)


def decode_rows(rows: bytes) -> list[dict[str, object]]:
    """Decode the format by the types of the columns."""
    assert rows[:19] == b"PGCOPY\n\xff\r\n\x00" + bytes(8)
    offset, decoded = 19, []
    while (count := int.from_bytes(rows[offset : offset + 2], signed=True)) != -1:
        offset += 2
        assert count == len(JOB_COLUMNS)
        row: dict[str, object] = {}
        for name in JOB_COLUMNS:
            length = int.from_bytes(rows[offset : offset + 4], signed=True)
            offset += 4
            value = None if length == -1 else rows[offset : offset + length]
            offset += max(0, length)
            row[name] = None if value is None else _value(str(jobs.c[name].type), value)
        decoded.append(row)
    assert rows[offset:] == b"\xff\xff"
    return decoded


def _value(kind: str, value: bytes) -> object:
    if kind in ("INTEGER", "SMALLINT"):
        assert len(value) == (4 if kind == "INTEGER" else 2)
        return int.from_bytes(value, signed=True)
    if kind.startswith(("TIMESTAMP", "DATETIME", "BIGINT")):
        assert len(value) == 8
        return int.from_bytes(value, signed=True) // 1_000 + _EPOCH_2000_MS
    return value.decode()


def driver_rows(drafts: list[JobDraft]) -> list[dict[str, object]]:
    """The rows as the driver would get them."""
    rows = [job_row(draft, "q", lambda ms: ms or None) for draft in drafts]
    return [dict(zip(JOB_COLUMNS, row, strict=True)) for row in rows]


HISTORIES: dict[str, list[Event]] = {
    "queued": [created()],
    "all options": [
        created(
            priority=9,
            idempotency_key="order-7",
            trace_id="tr-1",
            context={"user": "ada"},
            run_at_ms=9_000,
            meta='{"webhook":{"url":"https://example.org/hook"}}',
        )
    ],
    "succeeded": [
        created(),
        moved("j1", State.QUEUED, State.RUNNING, attempt=1, worker="w"),
        moved("j1", State.RUNNING, State.SUCCEEDED, attempt=1, worker="w", data={"result": '"ok"'}),
    ],
    "retrying": [
        created(),
        moved("j1", State.QUEUED, State.RUNNING, attempt=1, worker="w"),
        moved(
            "j1",
            State.RUNNING,
            State.RETRYING,
            attempt=1,
            retry_count=1,
            worker="w",
            data={"error_code": "E", "error": "boom", "next_attempt_at_ms": 8_000},
        ),
    ],
    "all columns": [
        created(run_at_ms=9_000, trace_id="tr-1", context={"user": "ada"}, meta="{}"),
        moved("j1", State.QUEUED, State.RUNNING, attempt=3, retry_count=2, worker="w"),
        moved("j1", State.RUNNING, State.CANCELLED, attempt=3, retry_count=2),
    ],
    "two": [created("a"), created("b", priority=1)],
}


@pytest.mark.parametrize("name", HISTORIES)
def test_a_row_has_the_values_the_driver_would_write(name: str) -> None:
    drafts = fold_optimistic(HISTORIES[name]).drafts
    if name == "all columns":
        # Every column has a distinct value, so that swapped columns are noticed.
        for number, column in enumerate(("worker", "error_code", "last_error", "error_message", "result", "dlq_id")):
            setattr(drafts[0], column, f"{column} {number}")
        drafts[0].next_retry_at_ms = 11_000
    assert decode_rows(job_rows(drafts, "q")) == driver_rows(drafts)


@pytest.mark.parametrize("draft", [{"attempt": 2**31}, {"retry_count": -(2**31) - 1}])
def test_a_count_beyond_the_columns_range_is_refused(draft: dict[str, int]) -> None:
    (bad,) = fold_optimistic(HISTORIES["queued"]).drafts
    for name, value in draft.items():
        setattr(bad, name, value)
    with pytest.raises(OverflowError):
        job_rows([bad], "q")


@pytest.mark.parametrize("data", [{"priority": 40_000}, {"payload": "\ud800"}])
def test_values_that_cannot_be_encoded_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises((OverflowError, ValueError)):
        job_rows(fold_optimistic([created(**data)]).drafts, "q")
