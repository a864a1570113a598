"""Source G's replays RP-001 to RP-005 (requirement X3), through the HTTP service and its run endpoint (H3).

Each replay writes a record, a JSON file: trace_id, job_id, retry_count, and every transition in the ledger. No worker
runs: each call of the run endpoint is one attempt.
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
TIMEOUT_S = 60.0


@pytest.fixture(params=["embedded", "redis+postgres"])
def stores(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> dict[str, Any]:
    if request.param == "embedded":
        return {"url": f"sqlite:///{tmp_path / 'holdfast.db'}"}
    url, ledger = request.getfixturevalue("redis_url"), request.getfixturevalue("postgres_url")
    return {"url": url, "ledger": ledger, "namespace": namespace}


class Gate:
    """A client of the service that writes a record of each replay."""

    def __init__(self, http: httpx.Client, folder: Path) -> None:
        self.http = http
        self.folder = folder

    def submit(self, replay: str) -> str:
        body = {"task": "index", "payload": {"document": replay}, "trace_id": f"trace-{replay}", "durable": True}
        response = self.http.post("/api/v1/jobs", json=body)
        assert response.status_code == 202, response.text
        job_id: str = response.json()["job_id"]
        return job_id

    def run(self, job_id: str, **options: bool) -> dict[str, Any]:
        response = self.http.post(f"/api/v1/internal/jobs/{job_id}/run", params=options)
        assert response.status_code == 200, response.text
        job: dict[str, Any] = response.json()
        return job

    def transitions(self, job_id: str) -> list[dict[str, Any]]:
        response = self.http.get(f"/api/v1/jobs/{job_id}/events")
        assert response.status_code == 200, response.text
        return [event for event in response.json()["events"] if event["to_state"] is not None]

    def write_record(self, replay: str, job_id: str, move_count: int) -> dict[str, Any]:
        """Wait until the ledger has N moves of the job. Write the replay's record and read it back."""
        deadline = time.monotonic() + TIMEOUT_S
        while len(events := self.transitions(job_id)) < move_count:
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
        written: dict[str, Any] = json.loads(artefact.read_text(encoding="utf-8"))
        assert (written["trace_id"], written["job_id"]) == (f"trace-{replay}", job_id)
        return written


@pytest.fixture
def gate(stores: dict[str, Any], tmp_path: Path) -> Iterator[Gate]:
    app = Holdfast(**stores)

    # The retry is due much later: the run endpoint does not wait for it.
    @app.task(retry=Retry(max_retries=3, base=600, jitter=None))
    async def index(document: str) -> str:
        return f"indexed {document}"

    folder = tmp_path / "replays"
    folder.mkdir()
    with serving(app, run_endpoint=True) as deployment, deployment.client("gate", Role.OPERATOR) as http:
        yield Gate(http, folder)


def list_moves(record: dict[str, Any]) -> list[tuple[str | None, str]]:
    return [(one["from"], one["to"]) for one in record["status_transition"]]


def retry_moves(times: int) -> list[tuple[str | None, str]]:
    """Return the moves of N transient errors, each followed by a retry."""
    moves_made: list[tuple[str | None, str]] = [(None, "queued")]
    state = "queued"
    for _ in range(times):
        moves_made += [(state, "running"), ("running", "retrying")]
        state = "retrying"
    return moves_made


def test_rp_001_the_job_is_claimed_and_succeeds(gate: Gate) -> None:
    job_id = gate.submit("RP-001")
    after = gate.run(job_id)
    assert (after["state"], after["result"]) == ("succeeded", "indexed RP-001")
    record = gate.write_record("RP-001", job_id, 3)
    assert list_moves(record) == SUCCEEDED
    assert (record["retry_count"], record["status"]) == (0, "succeeded")


def test_rp_002_one_transient_error(gate: Gate) -> None:
    job_id = gate.submit("RP-002")
    failed = gate.run(job_id, transient_fail=True)
    assert (failed["state"], failed["retry_count"]) == ("retrying", 1)
    assert gate.run(job_id)["state"] == "succeeded"
    record = gate.write_record("RP-002", job_id, 5)
    assert list_moves(record) == [*retry_moves(1), ("retrying", "running"), ("running", "succeeded")]
    assert (record["retry_count"], record["status"]) == (1, "succeeded")


def test_rp_003_three_transient_errors_in_a_row(gate: Gate) -> None:
    job_id = gate.submit("RP-003")
    for number in (1, 2, 3):
        failed = gate.run(job_id, transient_fail=True)
        assert (failed["state"], failed["retry_count"]) == ("retrying", number)
    assert gate.run(job_id)["state"] == "succeeded"
    record = gate.write_record("RP-003", job_id, 9)
    assert list_moves(record) == [*retry_moves(3), ("retrying", "running"), ("running", "succeeded")]
    assert (record["retry_count"], record["status"]) == (3, "succeeded")


def test_rp_004_the_fourth_transient_error_dead_letters_the_job(gate: Gate) -> None:
    job_id = gate.submit("RP-004")
    for _ in range(3):
        assert gate.run(job_id, transient_fail=True)["state"] == "retrying"
    assert gate.run(job_id, transient_fail=True)["state"] == "failed"
    record = gate.write_record("RP-004", job_id, 11)
    dead_lettered = [("running", "dlq_pending"), ("dlq_pending", "dlq_recorded"), ("dlq_recorded", "failed")]
    assert list_moves(record) == [*retry_moves(3), ("retrying", "running"), *dead_lettered]
    assert (record["retry_count"], record["status"]) == (3, "failed")
    dead_letter = gate.http.get(f"/api/v1/dlq/{record['dlq_id']}").json()
    assert (dead_letter["job_id"], dead_letter["retry_count"], dead_letter["trace_id"]) == (job_id, 3, "trace-RP-004")


def test_rp_005_a_second_final_write_is_refused(gate: Gate) -> None:
    job_id = gate.submit("RP-005")
    assert gate.run(job_id)["state"] == "succeeded"
    before = gate.write_record("RP-005", job_id, 3)
    for response in (
        gate.http.post(f"/api/v1/internal/jobs/{job_id}/run"),
        gate.http.post(f"/api/v1/internal/jobs/{job_id}/run", params={"force_fail": True}),
        gate.http.post(f"/api/v1/internal/jobs/{job_id}/run", params={"transient_fail": True}),
        gate.http.post(f"/api/v1/jobs/{job_id}/cancel", json={"reason": "too late"}),
    ):
        assert response.status_code == 409, response.text
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["code"] == "WF_STATE_TRANSITION_INVALID"
    # Events in flight to the ledger arrive before those of a job that is submitted now.
    gate.write_record("RP-005-after", gate.submit("RP-005-after"), 1)
    assert gate.write_record("RP-005", job_id, 3) == before
    assert list_moves(before) == SUCCEEDED


def test_force_fail_dead_letters_the_job_at_once(gate: Gate) -> None:
    job_id = gate.submit("force-fail")
    assert gate.run(job_id, force_fail=True)["state"] == "failed"
    record = gate.write_record("force-fail", job_id, 5)
    assert list_moves(record) == [
        (None, "queued"),
        ("queued", "running"),
        ("running", "dlq_pending"),
        ("dlq_pending", "dlq_recorded"),
        ("dlq_recorded", "failed"),
    ]
    assert record["retry_count"] == 0
    assert record["dlq_id"]


def test_the_run_endpoint_is_disabled_by_default(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path / 'holdfast.db'}")

    @app.task
    async def index(document: str) -> str:
        return document

    with serving(app) as deployment, deployment.client("gate", Role.OPERATOR) as http:
        job_id = http.post("/api/v1/jobs", json={"task": "index", "payload": {"document": "x"}}).json()["job_id"]
        assert http.post(f"/api/v1/internal/jobs/{job_id}/run").status_code == 404
        assert http.get(f"/api/v1/jobs/{job_id}").json()["state"] == "queued"
