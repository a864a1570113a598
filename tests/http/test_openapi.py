"""The OpenAPI document: every operation has an example of what goes in, of what comes out, and of every error."""

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
from tests.http.deployment import World, sample
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
    """What is sent and what is answered: where, schema and examples."""
    bodies = {"request": operation.get("requestBody", {})} | operation["responses"]
    for where, body in bodies.items():
        for content in body.get("content", {}).values():
            yield where, content
    for parameter in operation["parameters"]:
        if parameter["in"] == "path":
            yield parameter["name"], parameter


def test_everything_has_an_example_that_fits(document: Document) -> None:
    missing, misfits = [], []
    for name, operation in _operations(document):
        for where, content in _contents(operation):
            examples = [each["value"] for each in content.get("examples", {}).values()]
            examples += [content["example"]] if "example" in content else []
            if not examples:
                missing.append(f"{name} {where}")
            schema = content["schema"] | {"components": document["components"]}
            misfits += [f"{name} {where}: {each}" for each in examples if not jsonschema_rs.is_valid(schema, each)]
    assert (missing, misfits) == ([], [])


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


def test_every_operation_tells_its_errors(document: Document) -> None:
    """Refused tokens and stores that are down wherever somebody is asked for; bodies that do not fit wherever one is
    read. An error is told with its codes, each by an example."""
    for name, operation in _operations(document):
        wanted = {"422"}
        wanted |= {"401", "403", "503"} if "security" in operation else set()
        wanted |= {"400", "413", "415"} if "requestBody" in operation else set()
        responses = operation["responses"]
        assert wanted <= responses.keys(), name
        for status in wanted:
            (content,) = responses[status]["content"].values()
            assert content["schema"] == {"$ref": "#/components/schemas/Problem"}
            assert set(responses[status]["x-problem-codes"]) == content["examples"].keys()


def test_links_lead_to_operations_and_their_parameters(document: Document) -> None:
    parameters = {
        operation["operationId"]: {parameter["name"] for parameter in operation["parameters"]}
        for _, operation in _operations(document)
    }
    for _, operation in _operations(document):
        for answer in operation["responses"].values():
            for link in answer.get("links", {}).values():
                assert link["parameters"].keys() <= parameters[link["operationId"]]


@pytest.mark.parametrize("value", [b"\x84", b"a b", b"x" * 8_001])
def test_a_last_event_id_that_nobody_can_have_given_out(shared: World, value: bytes) -> None:
    reply = shared.client().get("/api/v1/stream", headers=[(b"Last-Event-ID", value)])
    assert (reply.status_code, reply.json()["code"]) == (422, "INVALID_REQUEST")


def test_a_reason_is_more_than_blanks(shared: World) -> None:
    job_id = _submit(shared.client())
    for reason in ("", " \n", "\u2003", "\x1f"):
        reply = shared.client().post(f"/api/v1/jobs/{job_id}/cancel", json={"reason": reason})
        assert (reply.status_code, reply.json()["code"]) == (422, "INVALID_REQUEST")


def test_a_place_where_nothing_stands_is_a_place(shared: World) -> None:
    """A cursor of the right shape goes on from there, whatever it says, and shows nothing of others."""
    _submit(shared.client())
    stranger = shared.client("eve", Role.VIEWER, ("nobody",))
    for cursor in ("9999999999999999-ff-00-61", "0---"):
        assert stranger.get(f"/api/v1/jobs?cursor={cursor}").json() == {"jobs": [], "cursor": None}
    found = shared.client().get("/api/v1/jobs?cursor=9999999999999999-ff-00-61").json()
    assert found["jobs"] != []
