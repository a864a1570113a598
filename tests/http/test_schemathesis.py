"""Schemathesis on the whole API: all checks, a token of every role and none, stateful links, nothing left out.

The program runs beside a real server with its own database; the seed is fixed. Every operation gets a hundred examples
from everybody who comes with a token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from holdfast import Context, Holdfast
from holdfast.core.principal import Role
from holdfast.http.openapi import CODES
from tests.http.deployment import PATIENCE_S, World, leave_a_trigger, sample, serving

_PROGRAM: Final = Path(sys.executable).parent / "st"
#: Every stream tells at once that it is ready; the client goes away then. Waiting is bounded by the service's setting.
_CONFIGURATION: Final = "max-stream-events = 1\n"
_TIMEOUT_S: Final = 1_800
_SEED: Final = 20261115
#: Random cases of each operation, beside hundreds that are the same for everybody. Whoever may do less gets the same
#: answers as an administrator, or is refused: fewer will do, and they are others than an administrator's.
_EXAMPLES: Final = 100
_EXAMPLES_OF_OTHERS: Final = 25
#: Who comes, and of which tenants.
_WHO: Final = {
    "admin": (Role.ADMIN, ("*",)),
    "operator": (Role.OPERATOR, ("default",)),
    "approver": (Role.APPROVER, ("default", "acme")),
    "viewer": (Role.VIEWER, ("*",)),
    "nobody": (None, ()),
}


@pytest.fixture
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of these tests, in whichever process, keep tables of characters: they take seconds to make."""
    return tmp_path_factory.getbasetemp().parent / "hypothesis-tables"


@pytest.mark.search
@pytest.mark.timeout(_TIMEOUT_S)
@pytest.mark.parametrize("who", _WHO)
def test_schemathesis_finds_nothing(who: str, tmp_path: Path, tables: Path) -> None:
    role, tenants = _WHO[who]
    app = _app(f"sqlite:///{tmp_path / 'jobs.db'}")
    with serving(app, worker=True, upkeep=True, run_endpoint=True) as world:
        _furnish(world)
        words = [] if role is None else ["-H", f"Authorization: Bearer {world.token(who, role, tenants)}"]
        schema = tmp_path / "openapi.json"
        schema.write_text(json.dumps(_strict(world.client().get("/openapi.json").json())))
        config = tmp_path / "schemathesis.toml"
        config.write_text(_CONFIGURATION)
        done = subprocess.run(
            [
                str(_PROGRAM),
                "--config-file",
                str(config),
                "run",
                str(schema),
                "--url",
                world.base,
                "--checks",
                "all",
                "--max-examples",
                str(_EXAMPLES if role is Role.ADMIN else _EXAMPLES_OF_OTHERS),
                "--seed",
                str(_SEED + list(_WHO).index(who)),
                "--suppress-health-check",
                "all",
                "--generation-database",
                "none",
                "--request-timeout",
                "60",
                "--continue-on-failure",
                "--no-shrink",
                "--no-color",
                *words,
            ],
            cwd=tmp_path,
            env=os.environ | {"HYPOTHESIS_STORAGE_DIRECTORY": str(tables)},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-2_000:]}"
        # Who has gone away is noticed.
        _until(lambda: world.service.hub.subscriber_count == 0)


def _strict(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the status and the codes of every error in its schema, so that they are checked."""
    for operation in [each for methods in document["paths"].values() for each in methods.values()]:
        for status, response in operation["responses"].items():
            if codes := response.get(CODES):
                (content,) = response["content"].values()
                known = {"properties": {"status": {"const": int(status)}, "code": {"enum": codes}}}
                content["schema"] = {"allOf": [content["schema"], known]}
    return document


def _app(url: str) -> Holdfast:
    app = sample(url, http_wait_limit_s=0.05)

    @app.task
    async def publish(ctx: Context, copies: int, to: list[str] | None = None) -> int:
        await ctx.approval("publish", {"copies": copies})
        return copies

    return app


def _furnish(world: World) -> None:
    """Something of every kind to be found."""
    world.call(lambda: leave_a_trigger(world.service))
    jobs = [("add", {"a": 1}), ("refuse", {}), ("park", {}), ("flaky", {}), *[("publish", {"copies": 2})] * 3]
    with world.client() as client:
        for task, payload in jobs:
            for tenant in ("default", "acme"):
                body = {"task": task, "payload": payload, "tenant_id": tenant}
                assert client.post("/api/v1/jobs?wait=5", json=body).status_code in (200, 202)
        _until(lambda: len(client.get("/api/v1/approvals").json()["approvals"]) == 6)
        _until(lambda: len(client.get("/api/v1/suspended").json()["jobs"]) == 2)
        _until(lambda: len(client.get("/api/v1/dlq").json()["dead_letters"]) == 2)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
