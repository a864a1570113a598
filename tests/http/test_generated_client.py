"""A client that `openapi-python-client` generates from the document works against a real service."""

from __future__ import annotations

import importlib
import pkgutil
import re
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any, Final

import msgspec
import pytest
from pydantic import BaseModel

from holdfast import Holdfast
from holdfast.core.principal import Role
from holdfast.http import create_api
from holdfast.http.task_schemas import references
from tests.cli.harness import TIMEOUT_S
from tests.http.deployment import Deployment

_PACKAGE: Final = "holdfast_client"
_HOW_TO: Final = Path(__file__).parents[2] / "docs" / "how-to" / "http-service.md"


def _generate(document: bytes, folder: Path) -> str:
    """Generate the client; returns what the generator printed."""
    (folder / "openapi.json").write_bytes(document)
    # The default hooks are only formatters, which may be missing on PATH.
    (folder / "config.yml").write_text("post_hooks: []\n")
    words = ["--path", "openapi.json", "--config", "config.yml", "--meta", "none", "--output-path", _PACKAGE]
    done = subprocess.run(
        [sys.executable, "-m", "openapi_python_client", "generate", *words, "--fail-on-warning"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def package(working: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """All modules of the generated client, by their last name."""
    document = working.client().get("/openapi.json").content
    assert "arning" not in _generate(document, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        yield SimpleNamespace(**{name.rpartition(".")[2]: module for name, module in _modules().items()})
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
            del sys.modules[name]


def _modules() -> dict[str, ModuleType]:
    root = importlib.import_module(_PACKAGE)
    names = [found.name for found in pkgutil.walk_packages(root.__path__, f"{_PACKAGE}.")]
    return {name: importlib.import_module(name) for name in names}


def test_a_generated_client_submits_waits_lists_and_cancels(
    working: Deployment, package: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = package.models
    with package.client.AuthenticatedClient(base_url=working.base, token=working.token()) as client:
        request = models.SubmitAddRequest(task="add", payload=models.AddArguments(a=1, b=2))
        job = package.submit_job.sync(client=client, body=request, wait=30)
        assert isinstance(job, models.SubmittedJobResponse)
        assert (job.state, job.result) == (models.State.SUCCEEDED, 3)

        request = models.SubmitAddRequest(task="add", payload=models.AddArguments(a=1), delay_s=3600)
        later = package.submit_job.sync(client=client, body=request)
        assert isinstance(later, models.SubmitResponse)
        assert package.get_job.sync(later.job_id, client=client).state == models.State.QUEUED

        cancelled = package.cancel_job.sync(later.job_id, client=client, body=models.ReasonRequest(reason="a test"))
        assert cancelled.state == models.State.CANCELLED

        page = package.list_jobs.sync(client=client, state=[models.State.CANCELLED])
        assert [each.job_id for each in page.jobs] == [later.job_id]
        many = package.submit_jobs.sync(
            client=client,
            body=models.BulkSubmitRequest(
                jobs=[
                    models.BulkSubmitAddItem(task="add", payload=models.AddArguments(a=1), idempotency_key="one"),
                    models.BulkSubmitRefuseItem(task="refuse"),
                ]
            ),
        )
        assert (many.accepted, many.refused) == (2, 0)
    _run_how_to(working, tmp_path / "program.py")
    assert capsys.readouterr().out == "3.0\n"


def _run_how_to(working: Deployment, program: Path) -> None:
    """The program that the how-to shows."""
    found = re.search(r"^    from holdfast_client .*?(?=^\S)", _HOW_TO.read_text(), re.DOTALL | re.MULTILINE)
    assert found
    program.write_text(textwrap.dedent(found.group()).replace("http://127.0.0.1:8000", working.base))
    runpy.run_path(str(program), {"token": working.token()})


def test_a_generated_client_parses_errors(working: Deployment, package: SimpleNamespace) -> None:
    models = package.models
    reason_body = models.ReasonRequest(reason="a test")
    with package.client.AuthenticatedClient(base_url=working.base, token=working.token()) as client:
        missing = package.get_job.sync_detailed("missing", client=client)
        assert (missing.status_code, missing.parsed.code) == (404, "UNKNOWN_JOB")
        assert isinstance(missing.parsed, models.Problem)
        done = package.submit_job.sync(
            client=client, body=models.SubmitAddRequest(task="add", payload=models.AddArguments(a=1)), wait=30
        )
        conflict = package.cancel_job.sync(done.job_id, client=client, body=reason_body)
        assert isinstance(conflict, models.Problem)
        assert (conflict.status, conflict.code) == (409, "WF_STATE_TRANSITION_INVALID")
        assert conflict.from_state == "succeeded"
        invalid = package.list_jobs.sync(client=client, cursor="no cursor")
        assert (invalid.status, invalid.code) == (422, "INVALID_REQUEST")
    viewer = working.token("eve", Role.VIEWER, ("default",))
    with package.client.AuthenticatedClient(base_url=working.base, token=viewer) as client:
        assert package.cancel_job.sync(done.job_id, client=client, body=reason_body).status == 403
    with package.client.AuthenticatedClient(base_url=working.base, token="hf_no") as client:
        assert package.list_jobs.sync(client=client).code == "UNAUTHORIZED"


class Item(BaseModel):
    amount: int


class Job(BaseModel):
    """Shares its name with a schema of the API."""

    items: list[Item]


@dataclass
class Order:
    item: Item
    job: Job


class Problem(msgspec.Struct):
    """Also shares its name with a schema of the API."""

    text: str


class Odd(BaseModel):
    """Has no JSON Schema."""

    call: Callable[[], int] | None = None


class Another:
    class Order(msgspec.Struct):
        other: int


def _awkward() -> Holdfast:
    """Tasks whose names and types are similar to each other's, or to the API's own."""
    app = Holdfast("sqlite://")

    @app.task(name="send-mail")
    async def first(order: Order) -> None: ...

    @app.task(name="send_mail")
    async def second(order: Order, problem: Problem) -> None: ...

    @app.task(name="shop.tasks.SendMail")
    async def third(job: Job | None = None) -> None: ...

    @app.task(name="!/1")
    async def fourth(anything: object, more: dict[str, Any]) -> None: ...

    @app.task(name="bulk")
    async def fifth(order: Another.Order, text: Annotated[str, ["x"]]) -> None: ...

    @app.task(name="odd")
    async def sixth(odd: Odd) -> None: ...

    return app


def _without_tasks() -> Holdfast:
    return Holdfast("sqlite://")


@pytest.mark.parametrize("make", [_awkward, _without_tasks])
def test_a_client_is_generated_from_any_app(make: Callable[[], Holdfast], tmp_path: Path) -> None:
    assert "arning" not in _generate(msgspec.json.encode(create_api(make()).openapi()), tmp_path)


def test_types_of_the_app_do_not_replace_those_of_the_api() -> None:
    own = create_api(_without_tasks()).openapi()["components"]["schemas"]
    document = create_api(_awkward()).openapi()
    schemas = document["components"]["schemas"]
    changed = {name for name in own if own[name] != schemas[name]}
    assert changed == {"SubmitRequest", "BulkSubmitItem"}
    assert {ref.rpartition("/")[2] for ref in references(document)} == schemas.keys()
    # Two tasks share a type, a third one has another of the same name.
    orders = [schema["properties"].keys() for name, schema in schemas.items() if name.endswith("Order")]
    assert sorted(map(sorted, orders)) == [["item", "job"], ["other"]]
    # Their names differ in punctuation only.
    mapping = schemas["SubmitRequest"]["discriminator"]["mapping"]
    assert len(mapping) == len({ref.lower() for ref in mapping.values()}) == 6
