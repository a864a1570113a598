"""The OpenAPI document: every operation has examples of its request, its responses and its errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from holdfast import Holdfast
from holdfast.core.principal import Role
from holdfast.http import create_api
from tests.http.deployment import Deployment, sample
from tests.http.test_jobs import _submit

Document = dict[str, Any]
Named = tuple[str, Mapping[str, Any]]


@pytest.fixture
def document(tmp_path: Path) -> Document:
    return create_api(sample(f"sqlite:///{tmp_path / 'jobs.db'}")).openapi()


def _operations(document: Document) -> Iterator[Named]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method} {path}", operation


def _contents(operation: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Request, responses and path parameters: name, schema and examples."""
    bodies = {"request": operation.get("requestBody", {})} | operation["responses"]
    for where, body in bodies.items():
        for content in body.get("content", {}).values():
            yield where, content
    for parameter in operation["parameters"]:
        if parameter["in"] == "path":
            yield parameter["name"], parameter


def test_everything_has_a_valid_example(document: Document) -> None:
    missing, invalid = [], []
    for name, operation in _operations(document):
        for where, content in _contents(operation):
            examples = [each["value"] for each in content.get("examples", {}).values()]
            examples += [content["example"]] if "example" in content else []
            if not examples:
                missing.append(f"{name} {where}")
            schema = content["schema"] | {"components": document["components"]}
            invalid += [f"{name} {where}: {each}" for each in examples if not jsonschema_rs.is_valid(schema, each)]
    assert (missing, invalid) == ([], [])


@pytest.mark.parametrize("simple", [True, False])
def test_submissions_have_an_example_of_the_apps_own_tasks(simple: bool) -> None:
    app = Holdfast("sqlite://")

    @app.task(name="b")
    async def order(number: int, at: datetime) -> None: ...

    if simple:

        @app.task(name="c")
        async def greet(name: str, times: int, loud: bool = False) -> None: ...

    document = create_api(app).openapi()
    for path in ("/api/v1/jobs", "/api/v1/jobs/bulk"):
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert ("example" in content) is simple
        schema = content["schema"] | {"components": document["components"]}
        assert not simple or jsonschema_rs.is_valid(schema, content["example"])


def test_every_operation_documents_its_errors(document: Document) -> None:
    """Refused tokens and unreachable stores wherever a token is needed; invalid bodies wherever one is read.

    Every error lists its codes, each with an example.
    """
    for name, operation in _operations(document):
        expected = {"422"}
        expected |= {"401", "403", "503"} if "security" in operation else set()
        expected |= {"400", "413", "415"} if "requestBody" in operation else set()
        responses = operation["responses"]
        assert expected <= responses.keys(), name
        for status in expected:
            (content,) = responses[status]["content"].values()
            assert content["schema"] == {"$ref": "#/components/schemas/Problem"}
            assert set(responses[status]["x-problem-codes"]) == content["examples"].keys()


def test_links_lead_to_operations_and_their_parameters(document: Document) -> None:
    parameters = {
        operation["operationId"]: {parameter["name"] for parameter in operation["parameters"]}
        for _, operation in _operations(document)
    }
    for _, operation in _operations(document):
        for response in operation["responses"].values():
            for link in response.get("links", {}).values():
                assert link["parameters"].keys() <= parameters[link["operationId"]]


@pytest.mark.parametrize("value", [b"\x84", b"a b"])
def test_an_invalid_last_event_id_is_refused(shared: Deployment, value: bytes) -> None:
    """One that could be of an earlier release, which could be long, is a `gap` instead."""
    reply = shared.client().get("/api/v1/stream", headers=[(b"Last-Event-ID", value)])
    assert (reply.status_code, reply.json()["code"]) == (422, "INVALID_REQUEST")


def test_a_blank_reason_is_refused(shared: Deployment) -> None:
    job_id = _submit(shared.client())
    for reason in ("", " \n", "\u2003", "\x1f"):
        reply = shared.client().post(f"/api/v1/jobs/{job_id}/cancel", json={"reason": reason})
        assert (reply.status_code, reply.json()["code"]) == (422, "INVALID_REQUEST")


def test_a_cursor_without_a_row_is_valid(shared: Deployment) -> None:
    """A well-formed cursor continues from its position, and does not reveal rows of other tenants."""
    _submit(shared.client())
    viewer = shared.client("eve", Role.VIEWER, ("empty",))
    for cursor in ("9999999999999999-ff-00-61", "0---"):
        assert viewer.get(f"/api/v1/jobs?cursor={cursor}").json() == {"jobs": [], "cursor": None}
    found = shared.client().get("/api/v1/jobs?cursor=9999999999999999-ff-00-61").json()
    assert found["jobs"] != []
