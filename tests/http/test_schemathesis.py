"""Schemathesis on the whole API: all checks, stateful links, a token of every role and none.

The program runs against a real server with its own database; the seed is fixed. Every operation gets 100 random
examples as an administrator, and 25 as each of the others.
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
from schemathesis.config._checks import (
    NEGATIVE_DATA_REJECTION_EXPECTED_STATUSES,
    POSITIVE_DATA_ACCEPTANCE_EXPECTED_STATUSES,
)

from holdfast import Context, Holdfast
from holdfast.core.principal import Role
from holdfast.http.openapi import CODES
from tests.http.deployment import TIMEOUT_S, Deployment, record_trigger, sample, serving

_PROGRAM: Final = Path(sys.executable).parent / "st"
#: Statuses for valid and for invalid data: those that the program expects, and those of an address that is too long,
#: which is refused before anything else is checked.
_VALID: Final = [*POSITIVE_DATA_ACCEPTANCE_EXPECTED_STATUSES, "414", "431"]
_INVALID: Final = [*NEGATIVE_DATA_REJECTION_EXPECTED_STATUSES, "414", "431"]
#: Every stream starts with a ready event; the client disconnects then. Waits are bounded by the service's setting.
#: A valid submission or replay whose idempotency key belongs to an earlier random one is a 422.
_CONFIGURATION: Final = f"""
max-stream-events = 1
checks.positive_data_acceptance.expected-statuses = {_VALID}
checks.negative_data_rejection.expected-statuses = {_INVALID}

[[operations]]
include-name = "POST /api/v1/jobs"
checks.positive_data_acceptance.expected-statuses = {[*_VALID, "422"]}

[[operations]]
include-name = "POST /api/v1/dlq/{{dlq_id}}/replay"
checks.positive_data_acceptance.expected-statuses = {[*_VALID, "422"]}
"""
_TIMEOUT_S: Final = 1_800
_SEED: Final = 20261115
#: Random cases of each operation, besides hundreds that are the same for all principals. Other roles get the same
#: responses as an administrator or are refused, so fewer cases are enough. Each principal has its own seed.
_EXAMPLES: Final = 100
_EXAMPLES_OF_OTHER_ROLES: Final = 25
#: Role and tenants of each principal.
_PRINCIPALS: Final = {
    "admin": (Role.ADMIN, ("*",)),
    "operator": (Role.OPERATOR, ("default",)),
    "approver": (Role.APPROVER, ("default", "acme")),
    "viewer": (Role.VIEWER, ("*",)),
    "anonymous": (None, ()),
}


@pytest.fixture
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for character tables, shared by the processes of these tests: the tables take seconds to make."""
    return tmp_path_factory.getbasetemp().parent / "hypothesis-tables"


@pytest.mark.search
@pytest.mark.timeout(_TIMEOUT_S)
@pytest.mark.parametrize("principal", _PRINCIPALS)
def test_schemathesis_finds_nothing(principal: str, tmp_path: Path, tables: Path) -> None:
    role, tenants = _PRINCIPALS[principal]
    app = _app(f"sqlite:///{tmp_path / 'jobs.db'}")
    with serving(app, worker=True, upkeep=True, run_endpoint=True) as deployment:
        _fill(deployment)
        words = [] if role is None else ["-H", f"Authorization: Bearer {deployment.token(principal, role, tenants)}"]
        schema = tmp_path / "openapi.json"
        schema.write_text(json.dumps(_strict(deployment.client().get("/openapi.json").json())))
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
                deployment.base,
                "--checks",
                "all",
                "--max-examples",
                str(_EXAMPLES if role is Role.ADMIN else _EXAMPLES_OF_OTHER_ROLES),
                "--seed",
                str(_SEED + list(_PRINCIPALS).index(principal)),
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
        # Disconnected clients are removed.
        _until(lambda: deployment.service.hub.subscriber_count == 0)


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


def _fill(deployment: Deployment) -> None:
    """Create at least one resource of every kind."""
    deployment.call(lambda: record_trigger(deployment.service))
    jobs = [("add", {"a": 1}), ("refuse", {}), ("park", {}), ("flaky", {}), *[("publish", {"copies": 2})] * 3]
    with deployment.client() as client:
        for task, payload in jobs:
            for tenant in ("default", "acme"):
                body = {"task": task, "payload": payload, "tenant_id": tenant}
                assert client.post("/api/v1/jobs?wait=5", json=body).status_code in (200, 202)
        _until(lambda: len(client.get("/api/v1/approvals").json()["approvals"]) == 6)
        _until(lambda: len(client.get("/api/v1/suspended").json()["jobs"]) == 2)
        _until(lambda: len(client.get("/api/v1/dlq").json()["dead_letters"]) == 2)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
