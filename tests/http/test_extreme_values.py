"""Values at the limits of their types: every operation answers with 4xx and the field, and never blames a store."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from holdfast.ledger.queries.paging import encode_cursor
from tests.http.deployment import TIMEOUT_S, Deployment

LISTS = ("jobs", "dlq", "approvals", "suspended", "operator-log")
#: Valid as datetimes, but not in UTC.
TOO_EARLY, TOO_LATE = "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"


def test_instants_outside_the_calendar_name_their_field(on_all_stores: Deployment) -> None:
    client = on_all_stores.client()
    client.post("/api/v1/jobs", json={"task": "add", "payload": {"a": 1}}).raise_for_status()
    # Without a row, the ledger is not queried by instant.
    wait_until(lambda: bool(client.get("/api/v1/jobs").json()["jobs"]))
    for path in LISTS:
        for field in ("since", "until"):
            for value in (TOO_EARLY, TOO_LATE):
                reply = client.get(f"/api/v1/{path}", params={field: value})
                assert (reply.status_code, field in reply.text) == (422, True), (path, field, value, reply.text)
            for value in ("0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z"):
                reply = client.get(f"/api/v1/{path}", params={field: value})
                assert reply.status_code == 200, (path, field, value, reply.text)
    for value in (TOO_EARLY, "0001-01-01T00:00:00Z"):
        reply = client.post("/api/v1/jobs", json={"task": "add", "payload": {"a": 1}, "run_at": value})
        assert reply.status_code in (201, 202), reply.text
    reply = client.post("/api/v1/jobs", json={"task": "add", "payload": {"a": 1}, "run_at": TOO_LATE})
    assert (reply.status_code, "run_at" in reply.text) == (422, True), reply.text
    for body in ({"since": TOO_EARLY}, {"until": TOO_LATE}):
        reply = client.post("/api/v1/dlq/replay", json={"filter": body, "reason": "x", "dry_run": True})
        assert reply.status_code in (404, 405, 422), reply.text


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("at_us", [2**63, -(2**63) - 1, 10**30, 10**18, -(10**17), 253_402_300_800_000_000])
def test_cursors_outside_the_calendar_are_invalid(on_all_stores: Deployment, at_us: int) -> None:
    client = on_all_stores.client()
    for path in LISTS:
        names = ("a", "default", "default") if path in ("jobs", "suspended") else ("a", "default")
        for cursor in (encode_cursor(at_us, *names), encode_cursor(at_us, *names[:2])):
            reply = client.get(f"/api/v1/{path}", params={"cursor": cursor})
            assert reply.status_code in (400, 422), (path, at_us, reply.text)
