"""Votes over HTTP: one per approver, before the deadline, not by the requester. Manual runs are guarded, too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast import Deny, Holdfast, RequireApproval
from holdfast.core.principal import Role
from holdfast.execution.backend import backend_of
from holdfast.guard.decisions import Decision, GuardRequest
from tests.http.deployment import Deployment, sample, serving
from tests.http.test_bad_input import _problem
from tests.http.test_jobs import _run, _submit


@contextmanager
def _guarded(folder: Path, decision: Decision) -> Iterator[Deployment]:
    """A deployment whose guard returns this decision for the task `add`."""
    app = sample(f"sqlite:///{folder / 'jobs.db'}")

    @app.guard
    def decide(request: GuardRequest) -> Decision | None:
        return decision if request.task == "add" else None

    with serving(app, upkeep=False, run_endpoint=True) as deployment:
        yield deployment


def _request_approval(client: httpx.Client) -> str:
    """Submit a job that waits for approval; return the path of its approval request."""
    job_id = _submit(client)
    assert client.get(f"/api/v1/jobs/{job_id}").json()["state"] == "waiting_approval"
    (approval,) = client.get(f"/api/v1/approvals?job_id={job_id}").json()["approvals"]
    return f"/api/v1/approvals/{approval['approval_id']}"


def _approve(client: httpx.Client, path: str) -> httpx.Response:
    return client.post(f"{path}/approve", json={"reason": "seen"})


def test_approving_twice_is_a_conflict(tmp_path: Path) -> None:
    with _guarded(tmp_path, RequireApproval("money", quorum=2)) as deployment:
        path = _request_approval(deployment.client("ada"))
        bob, cyd = deployment.client("bob", Role.APPROVER), deployment.client("cyd", Role.APPROVER)
        assert _approve(bob, path).json()["status"] == "requested"
        _problem(_approve(bob, path), 409, "CONFLICT")
        # One name is one principal, whatever the role of the token.
        _problem(_approve(deployment.client("bob", Role.ADMIN), path), 409, "CONFLICT")
        assert bob.get(path).json()["status"] == "requested"
        assert _approve(cyd, path).json()["status"] == "approved"
        _problem(_approve(cyd, path), 409, "CONFLICT")
        _problem(cyd.post(f"{path}/reject", json={"reason": "changed my mind"}), 409, "CONFLICT")
        job_id = cyd.get(path).json()["job_id"]
        assert cyd.get(f"/api/v1/jobs/{job_id}").json()["state"] == "queued"


def test_the_requester_cannot_approve(tmp_path: Path) -> None:
    with _guarded(tmp_path, RequireApproval("money")) as deployment:
        path = _request_approval(deployment.client("ada"))
        _problem(_approve(deployment.client("ada"), path), 403, "FORBIDDEN")
        _problem(_approve(deployment.client("ada", Role.APPROVER), path), 403, "FORBIDDEN")
        assert _approve(deployment.client("bob", Role.APPROVER), path).json()["status"] == "approved"


def test_approving_after_the_deadline_is_a_conflict(tmp_path: Path) -> None:
    """Even before upkeep has expired the approval request."""
    with _guarded(tmp_path, RequireApproval("money", deadline=0.2)) as deployment:
        path, bob = _request_approval(deployment.client("ada")), deployment.client("bob", Role.APPROVER)
        time.sleep(0.3)
        _problem(_approve(bob, path), 409, "CONFLICT")
        job_id = bob.get(path).json()["job_id"]
        assert bob.get(f"/api/v1/jobs/{job_id}").json()["state"] != "queued"


def test_an_approval_request_of_another_tenant_is_not_found(tmp_path: Path) -> None:
    with _guarded(tmp_path, RequireApproval("money")) as deployment:
        path, eve = _request_approval(deployment.client("ada")), deployment.client("eve", Role.APPROVER, ("acme",))
        assert eve.get("/api/v1/approvals").json()["approvals"] == []
        _problem(eve.get(path), 404, "NOT_FOUND")
        for verb in ("approve", "reject"):
            _problem(eve.post(f"{path}/{verb}", json={"reason": "mine"}), 404, "NOT_FOUND")


# Manual runs -------------------------------------------------------------------------------------------


def _submit_unguarded(deployment: Deployment) -> str:
    """Submit a job without a review, like a foreign message."""
    app: Holdfast = deployment.service.app
    envelope = backend_of(app).envelope("add", b'{"a": 1}')
    (receipt,) = deployment.call(lambda: deployment.service.operations.engine.submit([envelope]))
    return receipt.job_id


@pytest.mark.parametrize(
    ("decision", "state"),
    [(Deny("never"), "failed"), (RequireApproval("money"), "waiting_approval")],
    ids=["deny", "require approval"],
)
def test_a_manual_run_is_reviewed_by_the_guards(tmp_path: Path, decision: Decision, state: str) -> None:
    with _guarded(tmp_path, decision) as deployment:
        client = deployment.client("ada")
        job_id = _submit_unguarded(deployment)
        ended = _run(client, job_id).json()
        assert (ended["state"], ended["result"]) == (state, None)
        assert [entry["after"] for entry in _run_entries(client, job_id)] == [{"state": state}]


def _run_entries(client: httpx.Client, job_id: str) -> list[dict[str, Any]]:
    reply = client.get(f"/api/v1/operator-log?type=operator.run&target_id={job_id}")
    entries: list[dict[str, Any]] = reply.json()["entries"]
    return entries


def test_a_manual_run_is_in_the_audit_log(deployment: Deployment) -> None:
    client = deployment.client("ada")
    job_id = _submit(client)
    assert _run(client, job_id, "?transient_fail=true").status_code == 200
    assert _run(client, job_id).status_code == 200
    assert _run(client, job_id).status_code == 409
    last, first = _run_entries(client, job_id)
    assert (first["actor"], first["reason"], first["before"], first["after"]) == (
        "ada",
        "transient_fail",
        {"state": "queued"},
        {"state": "retrying"},
    )
    assert (last["before"], last["after"]) == ({"state": "retrying"}, {"state": "succeeded"})


def test_a_manual_run_that_raises_is_in_the_audit_log(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    client = deployment.client("ada")
    job_id = _submit(client)
    monkeypatch.setattr(deployment.service.debug_runner, "_perform", fail)
    assert _run(client, job_id).status_code == 500
    (entry,) = _run_entries(client, job_id)
    assert (entry["before"], entry["after"]) == ({"state": "queued"}, {})
