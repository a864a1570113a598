"""Triggers over HTTP: status, executions, pause and resume, and permissions."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from holdfast.core.principal import Role
from tests.http.deployment import Deployment, record_trigger

PATH = "/api/v1/triggers"


@pytest.fixture
def with_trigger(deployment: Deployment) -> Deployment:
    deployment.call(lambda: record_trigger(deployment.service, "orders"))
    return deployment


def status_and_code(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["code"]


def test_triggers_are_listed(with_trigger: Deployment) -> None:
    (trigger,) = with_trigger.client().get(PATH).json()["triggers"]
    process = trigger.pop("processes").pop()
    assert trigger == {
        "name": "orders",
        "queue_name": "orders",
        "adapter": "kafka",
        "status": "healthy",
        "active_workers": 4,
        "paused": False,
        "paused_by": None,
        "paused_at": None,
        "pause_reason": None,
    }
    assert process["process"] == "host-1-4711"
    assert process["health"]["adapter_healthy"] is True


def test_pause_and_resume(with_trigger: Deployment) -> None:
    ada = with_trigger.client("ada", Role.OPERATOR)
    paused = ada.post(f"{PATH}/orders/pause", json={"reason": "the warehouse moves"}).json()
    assert (paused["status"], paused["paused"], paused["paused_by"]) == ("paused", True, "ada")
    assert (paused["pause_reason"], paused["paused_at"] is not None) == ("the warehouse moves", True)
    bob = with_trigger.client("bob", Role.OPERATOR)
    again = bob.post(f"{PATH}/orders/pause", json={"reason": "me too"}).json()
    assert again["paused_by"] == "ada", "the first pause counts"
    assert with_trigger.client().get(PATH).json()["triggers"][0]["status"] == "paused"
    resumed = bob.post(f"{PATH}/orders/resume", json={"reason": "moved"}).json()
    assert (resumed["status"], resumed["paused"]) == ("healthy", False)
    assert audit_log(with_trigger) == [
        ("operator.trigger_resume", "bob", "orders", "moved"),
        ("operator.trigger_pause", "ada", "orders", "the warehouse moves"),
    ]


def audit_log(deployment: Deployment) -> list[tuple[Any, ...]]:
    entries = deployment.client().get("/api/v1/operator-log?target=trigger").json()["entries"]
    return [(entry["type"], entry["actor"], entry["target_id"], entry["reason"]) for entry in entries]


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_pause_and_resume_need_permission(with_trigger: Deployment, verb: str) -> None:
    body = {"reason": "why not"}
    assert status_and_code(with_trigger.anonymous().post(f"{PATH}/orders/{verb}", json=body))[0] == 401
    for name, role, tenants in (
        ("vic", Role.VIEWER, ("*",)),
        ("apu", Role.APPROVER, ("*",)),
        ("olga", Role.OPERATOR, ("acme",)),
    ):
        reply = with_trigger.client(name, role, tenants).post(f"{PATH}/orders/{verb}", json=body)
        assert status_and_code(reply) == (403, "FORBIDDEN")
    assert with_trigger.client().get(PATH).json()["triggers"][0]["paused"] is False
    assert audit_log(with_trigger) == []


@pytest.mark.parametrize("verb", ["pause", "resume"])
@pytest.mark.parametrize("name", ["unknown", "x" * 200, "%7B%7D", "a%20b"])
def test_an_unknown_trigger_is_not_found(with_trigger: Deployment, verb: str, name: str) -> None:
    assert status_and_code(with_trigger.client().post(f"{PATH}/{name}/{verb}", json={"reason": "why"})) == (
        404,
        "NOT_FOUND",
    )


def test_a_reason_is_required(with_trigger: Deployment) -> None:
    assert status_and_code(with_trigger.client().post(f"{PATH}/orders/pause", json={}))[0] == 422
    assert status_and_code(with_trigger.client().post(f"{PATH}/orders/pause", json={"reason": " "}))[0] == 422


def test_the_list_needs_access_to_all_tenants(with_trigger: Deployment) -> None:
    assert status_and_code(with_trigger.client("vic", Role.VIEWER, ("acme",)).get(PATH)) == (403, "FORBIDDEN")
    assert with_trigger.client("eve", Role.VIEWER).get(PATH).status_code == 200


def test_executions_are_limited_to_the_tenants_of_the_token(with_trigger: Deployment) -> None:
    def tenants(client: httpx.Client, query: str = "") -> list[str]:
        rows = client.get(f"{PATH}/executions{query}").json()["executions"]
        return sorted(row["tenant_id"] for row in rows)

    admin = with_trigger.client()
    assert tenants(admin) == ["acme", "default"]
    assert tenants(with_trigger.client("vic", Role.VIEWER, ("acme",))) == ["acme"]
    assert tenants(with_trigger.client("eve", Role.VIEWER, ("globex",))) == []
    assert tenants(admin, "?queue_name=orders&message_id=orders/0/17") == ["acme", "default"]
    assert tenants(admin, "?queue_name=others") == []
    assert tenants(admin, "?message_id=orders/0/18") == []
    assert len(tenants(admin, "?limit=1")) == 1
    assert tenants(admin, "?status=duplicate") == ["acme"]
    assert tenants(admin, "?status=duplicate&status=success") == ["acme", "default"]
    assert tenants(admin, "?status=failed") == []
    assert admin.get(f"{PATH}/executions?status=broken").status_code == 422
    (row,) = with_trigger.client("vic", Role.VIEWER, ("acme",)).get(f"{PATH}/executions").json()["executions"]
    assert {name: row[name] for name in ("status", "event_name", "duration_ms", "agent_run_id", "trace_id")} == {
        "status": "duplicate",
        "event_name": "order.placed",
        "duration_ms": 40,
        "agent_run_id": "job-1",
        "trace_id": "queue-orders/0/17",
    }


def test_a_process_without_a_recent_heartbeat_is_not_listed(
    with_trigger: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    triggers = with_trigger.service.operations.triggers
    now_ms = triggers._clock.now_ms()
    monkeypatch.setattr(triggers._clock, "now_ms", lambda: now_ms + 60_000)
    (trigger,) = with_trigger.client().get(PATH).json()["triggers"]
    assert (trigger["status"], trigger["processes"], trigger["active_workers"]) == ("gone", [], 0)
