"""People's answers over HTTP: once, in time, by somebody else; and what is run by hand is asked about like anything."""

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
from tests.http.deployment import World, sample, serving
from tests.http.test_bad_input import _problem
from tests.http.test_jobs import _run, _submit


@contextmanager
def _guarded(folder: Path, decision: Decision) -> Iterator[World]:
    """Whatever is called `add` is decided about so."""
    app = sample(f"sqlite:///{folder / 'jobs.db'}")

    @app.guard
    def look(request: GuardRequest) -> Decision | None:
        return decision if request.task == "add" else None

    with serving(app, upkeep=False, run_endpoint=True) as world:
        yield world


def _asked(client: httpx.Client) -> str:
    """A job that waits for an answer: the path of the question."""
    job_id = _submit(client)
    assert client.get(f"/api/v1/jobs/{job_id}").json()["state"] == "waiting_approval"
    (approval,) = client.get(f"/api/v1/approvals?job_id={job_id}").json()["approvals"]
    return f"/api/v1/approvals/{approval['approval_id']}"


def _yes(client: httpx.Client, path: str) -> httpx.Response:
    return client.post(f"{path}/approve", json={"reason": "seen"})


def test_approving_twice_is_a_conflict(tmp_path: Path) -> None:
    with _guarded(tmp_path, RequireApproval("money", quorum=2)) as world:
        path = _asked(world.client("ada"))
        bob, cyd = world.client("bob", Role.APPROVER), world.client("cyd", Role.APPROVER)
        assert _yes(bob, path).json()["status"] == "requested"
        _problem(_yes(bob, path), 409, "CONFLICT")
        # One name is one person, whatever else the token says.
        _problem(_yes(world.client("bob", Role.ADMIN), path), 409, "CONFLICT")
        assert bob.get(path).json()["status"] == "requested"
        assert _yes(cyd, path).json()["status"] == "approved"
        _problem(_yes(cyd, path), 409, "CONFLICT")
        _problem(cyd.post(f"{path}/reject", json={"reason": "changed my mind"}), 409, "CONFLICT")
        job_id = cyd.get(path).json()["job_id"]
        assert cyd.get(f"/api/v1/jobs/{job_id}").json()["state"] == "queued"


def test_whoever_asked_cannot_approve(tmp_path: Path) -> None:
    with _guarded(tmp_path, RequireApproval("money")) as world:
        path = _asked(world.client("ada"))
        _problem(_yes(world.client("ada"), path), 403, "FORBIDDEN")
        _problem(_yes(world.client("ada", Role.APPROVER), path), 403, "FORBIDDEN")
        assert _yes(world.client("bob", Role.APPROVER), path).json()["status"] == "approved"


def test_approving_after_the_deadline_is_a_conflict(tmp_path: Path) -> None:
    """Even before anybody has looked at the clock."""
    with _guarded(tmp_path, RequireApproval("money", deadline=0.2)) as world:
        path, bob = _asked(world.client("ada")), world.client("bob", Role.APPROVER)
        time.sleep(0.3)
        _problem(_yes(bob, path), 409, "CONFLICT")
        job_id = bob.get(path).json()["job_id"]
        assert bob.get(f"/api/v1/jobs/{job_id}").json()["state"] != "queued"


def test_another_tenants_question_is_not_there(tmp_path: Path) -> None:
    with _guarded(tmp_path, RequireApproval("money")) as world:
        path, eve = _asked(world.client("ada")), world.client("eve", Role.APPROVER, ("acme",))
        assert eve.get("/api/v1/approvals").json()["approvals"] == []
        _problem(eve.get(path), 404, "NOT_FOUND")
        for verb in ("approve", "reject"):
            _problem(eve.post(f"{path}/{verb}", json={"reason": "mine"}), 404, "NOT_FOUND")


# Run by hand -------------------------------------------------------------------------------------------


def _slip_in(world: World) -> str:
    """A job that no guard has seen, as another program's message would be."""
    app: Holdfast = world.service.app
    envelope = backend_of(app).envelope("add", b'{"a": 1}')
    (receipt,) = world.call(lambda: world.service.operations.engine.submit([envelope]))
    return receipt.job_id


@pytest.mark.parametrize(
    ("decision", "state"),
    [(Deny("never"), "failed"), (RequireApproval("money"), "waiting_approval")],
    ids=["no", "ask"],
)
def test_a_job_that_is_run_by_hand_is_shown_to_the_guards(tmp_path: Path, decision: Decision, state: str) -> None:
    with _guarded(tmp_path, decision) as world:
        client = world.client("ada")
        job_id = _slip_in(world)
        ended = _run(client, job_id).json()
        assert (ended["state"], ended["result"]) == (state, None)
        assert [line["after"] for line in _runs(client, job_id)] == [{"state": state}]


def _runs(client: httpx.Client, job_id: str) -> list[dict[str, Any]]:
    reply = client.get(f"/api/v1/operator-log?type=operator.run&target_id={job_id}")
    lines: list[dict[str, Any]] = reply.json()["entries"]
    return lines


def test_a_run_is_in_the_operators_log(world: World) -> None:
    client = world.client("ada")
    job_id = _submit(client)
    assert _run(client, job_id, "?transient_fail=true").status_code == 200
    assert _run(client, job_id).status_code == 200
    assert _run(client, job_id).status_code == 409
    last, first = _runs(client, job_id)
    assert (first["actor"], first["reason"], first["before"], first["after"]) == (
        "ada",
        "transient_fail",
        {"state": "queued"},
        {"state": "retrying"},
    )
    assert (last["before"], last["after"]) == ({"state": "retrying"}, {"state": "succeeded"})


def test_a_run_that_breaks_is_in_the_log_all_the_same(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def break_down(*_: object) -> None:
        raise RuntimeError("in the middle")

    client = world.client("ada")
    job_id = _submit(client)
    monkeypatch.setattr(world.service.debug_runner, "_perform", break_down)
    assert _run(client, job_id).status_code == 500
    (line,) = _runs(client, job_id)
    assert (line["before"], line["after"]) == ({"state": "queued"}, {})
