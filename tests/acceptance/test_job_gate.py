"""Source G's replays RP-001 to RP-005 (requirement X3), through the HTTP service and its run endpoint (H3).

Each replay leaves a record of its own, a JSON file: trace_id, job_id, retry_count, and every transition as the ledger
has it. No worker runs: each call of the run endpoint is one attempt.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast import Holdfast, Retry
from holdfast.core.principal import Role
from tests.http.deployment import serving

SUCCEEDED = [(None, "queued"), ("queued", "running"), ("running", "succeeded")]
PATIENCE_S = 60.0


@pytest.fixture(params=["embedded", "redis+postgres"])
def stores(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> dict[str, Any]:
    if request.param == "embedded":
        return {"url": f"sqlite:///{tmp_path / 'holdfast.db'}"}
    url, ledger = request.getfixturevalue("redis_url"), request.getfixturevalue("postgres_url")
    return {"url": url, "ledger": ledger, "namespace": namespace}


class Gate:
    """A client of the service that replays, and keeps a record of each replay."""

    def __init__(self, http: httpx.Client, folder: Path) -> None:
        self.http = http
        self.folder = folder

    def submit(self, replay: str) -> str:
        wanted = {"task": "index", "payload": {"document": replay}, "trace_id": f"trace-{replay}", "durable": True}
        answer = self.http.post("/api/v1/jobs", json=wanted)
        assert answer.status_code == 202, answer.text
        job_id: str = answer.json()["job_id"]
        return job_id

    def run(self, job_id: str, **how: bool) -> dict[str, Any]:
        answer = self.http.post(f"/api/v1/internal/jobs/{job_id}/run", params=how)
        assert answer.status_code == 200, answer.text
        job: dict[str, Any] = answer.json()
        return job

    def transitions(self, job_id: str) -> list[dict[str, Any]]:
        answer = self.http.get(f"/api/v1/jobs/{job_id}/events")
        assert answer.status_code == 200, answer.text
        return [event for event in answer.json()["events"] if event["to_state"] is not None]

    def keep(self, replay: str, job_id: str, moves: int) -> dict[str, Any]:
        """The replay's record, once the ledger has so many moves of the job: written, and read back."""
        deadline = time.monotonic() + PATIENCE_S
        while len(events := self.transitions(job_id)) < moves:
            assert time.monotonic() < deadline, f"the ledger has only {events}"
            time.sleep(0.02)
        job = self.http.get(f"/api/v1/jobs/{job_id}").json()
        record = {
            "replay_id": replay,
            "trace_id": job["trace_id"],
            "job_id": job["job_id"],
            "retry_count": job["retry_count"],
            "status": job["state"],
            "dlq_id": job["dlq_id"],
            "status_transition": [
                {"from": one["from_state"], "to": one["to_state"], "event": one["type"], "at": one["at"]}
                for one in events
            ],
        }
        artefact = self.folder / f"{replay}.json"
        artefact.write_text(json.dumps(record, indent=2), encoding="utf-8")
        kept: dict[str, Any] = json.loads(artefact.read_text(encoding="utf-8"))
        assert (kept["trace_id"], kept["job_id"]) == (f"trace-{replay}", job_id)
        return kept


@pytest.fixture
def gate(stores: dict[str, Any], tmp_path: Path) -> Iterator[Gate]:
    app = Holdfast(**stores)

    # The due time is far away: the run endpoint does not wait for it.
    @app.task(retry=Retry(max_retries=3, base=600, jitter=None))
    async def index(document: str) -> str:
        return f"indexed {document}"

    folder = tmp_path / "replays"
    folder.mkdir()
    with serving(app, run_endpoint=True) as world, world.client("gate", Role.OPERATOR) as http:
        yield Gate(http, folder)


def moves(record: dict[str, Any]) -> list[tuple[str | None, str]]:
    return [(one["from"], one["to"]) for one in record["status_transition"]]


def retried(times: int) -> list[tuple[str | None, str]]:
    """So many transient errors, each answered with a retry."""
    told: list[tuple[str | None, str]] = [(None, "queued")]
    state = "queued"
    for _ in range(times):
        told += [(state, "running"), ("running", "retrying")]
        state = "retrying"
    return told


def test_rp_001_a_worker_takes_it_and_it_succeeds(gate: Gate) -> None:
    job_id = gate.submit("RP-001")
    after = gate.run(job_id)
    assert (after["state"], after["result"]) == ("succeeded", "indexed RP-001")
    record = gate.keep("RP-001", job_id, 3)
    assert moves(record) == SUCCEEDED
    assert (record["retry_count"], record["status"]) == (0, "succeeded")


def test_rp_002_one_transient_error(gate: Gate) -> None:
    job_id = gate.submit("RP-002")
    failed = gate.run(job_id, transient_fail=True)
    assert (failed["state"], failed["retry_count"]) == ("retrying", 1)
    assert gate.run(job_id)["state"] == "succeeded"
    record = gate.keep("RP-002", job_id, 5)
    assert moves(record) == [*retried(1), ("retrying", "running"), ("running", "succeeded")]
    assert (record["retry_count"], record["status"]) == (1, "succeeded")


def test_rp_003_three_transient_errors_in_a_row(gate: Gate) -> None:
    job_id = gate.submit("RP-003")
    for number in (1, 2, 3):
        failed = gate.run(job_id, transient_fail=True)
        assert (failed["state"], failed["retry_count"]) == ("retrying", number)
    assert gate.run(job_id)["state"] == "succeeded"
    record = gate.keep("RP-003", job_id, 9)
    assert moves(record) == [*retried(3), ("retrying", "running"), ("running", "succeeded")]
    assert (record["retry_count"], record["status"]) == (3, "succeeded")


def test_rp_004_the_fourth_transient_error_is_the_last(gate: Gate) -> None:
    job_id = gate.submit("RP-004")
    for _ in range(3):
        assert gate.run(job_id, transient_fail=True)["state"] == "retrying"
    assert gate.run(job_id, transient_fail=True)["state"] == "failed"
    record = gate.keep("RP-004", job_id, 11)
    given_up = [("running", "dlq_pending"), ("dlq_pending", "dlq_recorded"), ("dlq_recorded", "failed")]
    assert moves(record) == [*retried(3), ("retrying", "running"), *given_up]
    assert (record["retry_count"], record["status"]) == (3, "failed")
    letter = gate.http.get(f"/api/v1/dlq/{record['dlq_id']}").json()
    assert (letter["job_id"], letter["retry_count"], letter["trace_id"]) == (job_id, 3, "trace-RP-004")


def test_rp_005_a_second_final_write_is_refused(gate: Gate) -> None:
    job_id = gate.submit("RP-005")
    assert gate.run(job_id)["state"] == "succeeded"
    before = gate.keep("RP-005", job_id, 3)
    for answer in (
        gate.http.post(f"/api/v1/internal/jobs/{job_id}/run"),
        gate.http.post(f"/api/v1/internal/jobs/{job_id}/run", params={"force_fail": True}),
        gate.http.post(f"/api/v1/internal/jobs/{job_id}/run", params={"transient_fail": True}),
        gate.http.post(f"/api/v1/jobs/{job_id}/cancel", json={"reason": "too late"}),
    ):
        assert answer.status_code == 409, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["code"] == "WF_STATE_TRANSITION_INVALID"
    # Whatever is on its way to the ledger would be there before what is submitted now.
    gate.keep("RP-005-after", gate.submit("RP-005-after"), 1)
    assert gate.keep("RP-005", job_id, 3) == before
    assert moves(before) == SUCCEEDED


def test_force_fail_goes_straight_to_the_dead_letters(gate: Gate) -> None:
    job_id = gate.submit("force-fail")
    assert gate.run(job_id, force_fail=True)["state"] == "failed"
    record = gate.keep("force-fail", job_id, 5)
    assert moves(record) == [
        (None, "queued"),
        ("queued", "running"),
        ("running", "dlq_pending"),
        ("dlq_pending", "dlq_recorded"),
        ("dlq_recorded", "failed"),
    ]
    assert record["retry_count"] == 0
    assert record["dlq_id"]


def test_the_run_endpoint_is_off_unless_switched_on(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path / 'holdfast.db'}")

    @app.task
    async def index(document: str) -> str:
        return document

    with serving(app) as world, world.client("gate", Role.OPERATOR) as http:
        job_id = http.post("/api/v1/jobs", json={"task": "index", "payload": {"document": "x"}}).json()["job_id"]
        assert http.post(f"/api/v1/internal/jobs/{job_id}/run").status_code == 404
        assert http.get(f"/api/v1/jobs/{job_id}").json()["state"] == "queued"
