"""Triggers over HTTP: who is there, what became of messages, pauses, and who may."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from holdfast.core.principal import Role
from tests.http.deployment import World, leave_a_trigger

PATH = "/api/v1/triggers"


@pytest.fixture
def furnished(world: World) -> World:
    world.call(lambda: leave_a_trigger(world.service, "orders"))
    return world


def code(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["code"]


def test_the_list(furnished: World) -> None:
    (trigger,) = furnished.client().get(PATH).json()["triggers"]
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


def test_pause_and_resume(furnished: World) -> None:
    ada = furnished.client("ada", Role.OPERATOR)
    paused = ada.post(f"{PATH}/orders/pause", json={"reason": "the warehouse moves"}).json()
    assert (paused["status"], paused["paused"], paused["paused_by"]) == ("paused", True, "ada")
    assert (paused["pause_reason"], paused["paused_at"] is not None) == ("the warehouse moves", True)
    bob = furnished.client("bob", Role.OPERATOR)
    again = bob.post(f"{PATH}/orders/pause", json={"reason": "me too"}).json()
    assert again["paused_by"] == "ada", "whoever paused it first has paused it"
    assert furnished.client().get(PATH).json()["triggers"][0]["status"] == "paused"
    resumed = bob.post(f"{PATH}/orders/resume", json={"reason": "moved"}).json()
    assert (resumed["status"], resumed["paused"]) == ("healthy", False)
    assert log(furnished) == [
        ("operator.trigger_resume", "bob", "orders", "moved"),
        ("operator.trigger_pause", "ada", "orders", "the warehouse moves"),
    ]


def log(world: World) -> list[tuple[Any, ...]]:
    lines = world.client().get("/api/v1/operator-log?target=trigger").json()["entries"]
    return [(line["type"], line["actor"], line["target_id"], line["reason"]) for line in lines]


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_who_may(furnished: World, verb: str) -> None:
    body = {"reason": "why not"}
    assert code(furnished.stranger().post(f"{PATH}/orders/{verb}", json=body))[0] == 401
    for name, role, tenants in (
        ("vic", Role.VIEWER, ("*",)),
        ("apu", Role.APPROVER, ("*",)),
        ("olga", Role.OPERATOR, ("acme",)),
    ):
        reply = furnished.client(name, role, tenants).post(f"{PATH}/orders/{verb}", json=body)
        assert code(reply) == (403, "FORBIDDEN")
    assert furnished.client().get(PATH).json()["triggers"][0]["paused"] is False
    assert log(furnished) == []


@pytest.mark.parametrize("verb", ["pause", "resume"])
@pytest.mark.parametrize("name", ["nobody", "x" * 200, "%7B%7D", "a%20b"])
def test_a_trigger_that_nobody_has_told_of(furnished: World, verb: str, name: str) -> None:
    assert code(furnished.client().post(f"{PATH}/{name}/{verb}", json={"reason": "why"})) == (404, "NOT_FOUND")


def test_a_reason_is_needed(furnished: World) -> None:
    assert code(furnished.client().post(f"{PATH}/orders/pause", json={}))[0] == 422
    assert code(furnished.client().post(f"{PATH}/orders/pause", json={"reason": " "}))[0] == 422


def test_the_list_is_for_those_of_every_tenant(furnished: World) -> None:
    assert code(furnished.client("vic", Role.VIEWER, ("acme",)).get(PATH)) == (403, "FORBIDDEN")
    assert furnished.client("eve", Role.VIEWER).get(PATH).status_code == 200


def test_executions_of_ones_own_tenants(furnished: World) -> None:
    def tenants(client: httpx.Client, query: str = "") -> list[str]:
        rows = client.get(f"{PATH}/executions{query}").json()["executions"]
        return sorted(row["tenant_id"] for row in rows)

    everybody = furnished.client()
    assert tenants(everybody) == ["acme", "default"]
    assert tenants(furnished.client("vic", Role.VIEWER, ("acme",))) == ["acme"]
    assert tenants(furnished.client("eve", Role.VIEWER, ("globex",))) == []
    assert tenants(everybody, "?queue_name=orders&message_id=orders/0/17") == ["acme", "default"]
    assert tenants(everybody, "?queue_name=others") == []
    assert tenants(everybody, "?message_id=orders/0/18") == []
    assert len(tenants(everybody, "?limit=1")) == 1
    assert tenants(everybody, "?status=duplicate") == ["acme"]
    assert tenants(everybody, "?status=duplicate&status=success") == ["acme", "default"]
    assert tenants(everybody, "?status=failed") == []
    assert everybody.get(f"{PATH}/executions?status=broken").status_code == 422
    (row,) = furnished.client("vic", Role.VIEWER, ("acme",)).get(f"{PATH}/executions").json()["executions"]
    assert {name: row[name] for name in ("status", "event_name", "duration_ms", "agent_run_id", "trace_id")} == {
        "status": "duplicate",
        "event_name": "order.placed",
        "duration_ms": 40,
        "agent_run_id": "job-1",
        "trace_id": "queue-orders/0/17",
    }


def test_a_process_that_has_gone_is_not_there(furnished: World, monkeypatch: pytest.MonkeyPatch) -> None:
    office = furnished.service.operations.triggers
    now_ms = office._clock.now_ms()
    monkeypatch.setattr(office._clock, "now_ms", lambda: now_ms + 60_000)
    (trigger,) = furnished.client().get(PATH).json()["triggers"]
    assert (trigger["status"], trigger["processes"], trigger["active_workers"]) == ("gone", [], 0)
