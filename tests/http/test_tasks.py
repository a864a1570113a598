"""`/api/v1/tasks`, and submissions to a service without an app: what workers have announced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.core.principal import Role
from holdfast.engine.redis.net.client import Purpose
from holdfast.execution.backend import backend_of
from tests.http.deployment import Deployment, serving


@pytest.fixture
def without_app(engine_url: str, namespace: str, postgres_url: str) -> Iterator[Deployment]:
    """A service without tasks; on Redis with a separate ledger."""
    ledger: dict[str, Any] = {"ledger": postgres_url} if engine_url.startswith("redis") else {}
    app = Holdfast(engine_url, namespace=namespace, **ledger)
    with serving(app, upkeep=True) as deployment:
        yield deployment


def other_app(deployment: Deployment) -> Holdfast:
    settings = deployment.service.app.settings
    app = Holdfast(settings.url, namespace=settings.namespace, ledger=settings.ledger)

    @app.task(queue="mail", priority="high")
    async def send(to: str, copies: int = 1, tags: list[str] | None = None) -> None: ...

    return app


def announce(deployment: Deployment) -> None:
    """Announce the tasks of another app, as a worker of it does."""
    app = other_app(deployment)
    tasks = backend_of(app).announcements()
    service = deployment.service

    async def run() -> None:
        await service.operations.engine.announce_tasks(tasks)
        ledger = service.operations.ledger
        if ledger is not None and ledger.projection is not None:
            await ledger.operators.announce_tasks(tasks)

    deployment.call(run)


def test_announced_tasks_are_listed_for_viewers(without_app: Deployment) -> None:
    client = without_app.client("vera", Role.VIEWER, ("acme",))
    assert client.get("/api/v1/tasks").json() == {"tasks": []}
    announce(without_app)
    (task,) = client.get("/api/v1/tasks").json()["tasks"]
    assert (task["task"], task["queue"], task["priority"]) == ("send", "mail", "high")
    assert (task["arguments"], task["current_schemas"]) == (["to", "[copies]", "[tags]"], 1)
    assert client.get("/api/v1/tasks", params={"queue": "default"}).json() == {"tasks": []}
    detail = client.get("/api/v1/tasks/send").json()
    (schema,) = detail["schemas"]
    assert schema["fingerprint"] == task["fingerprint"]
    assert list(schema["schema"]["properties"]) == ["to", "copies", "tags"]
    unknown = client.get("/api/v1/tasks/sned")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "TASK_NOT_ANNOUNCED")
    assert without_app.anonymous().get("/api/v1/tasks").status_code == 401


def test_a_submission_is_checked_and_goes_to_the_queue_of_its_task(without_app: Deployment) -> None:
    client = without_app.client()
    job: dict[str, Any] = {"task": "send", "payload": {"to": "ada"}}
    refused = client.post("/api/v1/jobs", json=job)
    assert (refused.status_code, refused.json()["code"]) == (404, "TASK_NOT_ANNOUNCED")
    assert "force" in refused.json()["detail"]
    forced = client.post("/api/v1/jobs", json=job | {"force": True})
    assert (forced.status_code, forced.json()["queue"]) == (202, "default")
    announce(without_app)
    accepted = client.post("/api/v1/jobs", json=job)
    assert (accepted.status_code, accepted.json()["queue"]) == (202, "mail")
    other = client.post("/api/v1/jobs", json=job | {"queue": "other"})
    assert other.json()["queue"] == "other"
    invalid = job | {"payload": {"to": "ada", "copies": "two"}}
    wrong = client.post("/api/v1/jobs", json=invalid)
    assert (wrong.status_code, wrong.json()["code"]) == (422, "INVALID_PAYLOAD")
    assert "$.copies" in wrong.json()["detail"]
    assert client.post("/api/v1/jobs", json=invalid | {"force": True}).json()["queue"] == "mail"
    bulk = client.post("/api/v1/jobs/bulk", json={"jobs": [job, {"task": "sned"}]})
    assert (bulk.status_code, bulk.json()["code"]) == (404, "TASK_NOT_ANNOUNCED")
    assert client.post("/api/v1/jobs/bulk", json={"jobs": [job, job]}).json()["accepted"] == 2


def test_after_a_wipe_the_ledger_knows_the_tasks(without_app: Deployment) -> None:
    service = without_app.service
    if not service.app.settings.url.startswith("redis"):
        pytest.skip("engine and ledger are one file")
    announce(without_app)
    client = without_app.client()
    service.backend.announced._fresh_until = 0.0
    engine: Any = service.operations.engine
    store = engine._store

    async def wipe() -> None:
        await store.client.call(Purpose.OTHER, b"DEL", store.names.tasks)

    without_app.call(wipe)
    assert [task["task"] for task in client.get("/api/v1/tasks").json()["tasks"]] == ["send"]
    accepted = client.post("/api/v1/jobs", json={"task": "send", "payload": {"to": "ada"}})
    assert (accepted.status_code, accepted.json()["queue"]) == (202, "mail")
    assert client.post("/api/v1/jobs", json={"task": "sned"}).status_code == 404
