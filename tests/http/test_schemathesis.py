"""Schemathesis on the whole API: all checks, a token of every role and none, stateful links, nothing left out.

The program runs beside a real server with its own database; the seed is fixed. Together every operation gets more than
a hundred examples; those of an admin, who may do everything, get a hundred alone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from holdfast.core.person import Role
from tests.http.world import World, sample, serving

_PROGRAM: Final = Path(sys.executable).parent / "st"
#: Streams are looked at up to their first event. Waiting is bounded by the service's own setting.
_CONFIGURATION: Final = "max-stream-events = 1\n"
_TIMEOUT_S: Final = 900
#: Who comes, of which tenants, and how many examples each operation gets.
_WHO: Final = {
    "admin": (Role.ADMIN, ("*",), 100),
    "operator": (Role.OPERATOR, ("default",), 25),
    "approver": (Role.APPROVER, ("default", "acme"), 25),
    "viewer": (Role.VIEWER, ("*",), 25),
    "nobody": (None, (), 25),
}


@pytest.mark.timeout(_TIMEOUT_S)
@pytest.mark.parametrize("who", _WHO)
def test_schemathesis_finds_nothing(who: str, tmp_path: Path) -> None:
    role, tenants, examples = _WHO[who]
    app = sample(f"sqlite:///{tmp_path / 'jobs.db'}", http_wait_limit_s=0.05)
    with serving(app, worker=True, upkeep=True, run_endpoint=True) as world:
        _furnish(world)
        words = [] if role is None else ["-H", f"Authorization: Bearer {world.token(who, role, tenants)}"]
        schema = tmp_path / "openapi.json"
        schema.write_bytes(world.client().get("/openapi.json").content)
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
                str(examples),
                "--seed",
                "20261115",
                "--suppress-health-check",
                "all",
                "--generation-database",
                "none",
                "--request-timeout",
                "20",
                "--continue-on-failure",
                "--no-shrink",
                "--no-color",
                *words,
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-2_000:]}"


def _furnish(world: World) -> None:
    """Something of every kind to be found."""
    with world.client() as client:
        for task, payload in (("add", {"a": 1}), ("refuse", {}), ("park", {}), ("flaky", {})):
            for tenant in ("default", "acme"):
                body = {"task": task, "payload": payload, "tenant_id": tenant}
                assert client.post("/api/v1/jobs?wait=5", json=body).status_code in (200, 202)
