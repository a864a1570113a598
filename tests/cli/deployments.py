"""A deployment on each pair of stores with a ledger, and the command line on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest

from tests.cli.test_commands import InProcess
from tests.operations.deployment import SampleDeployment, run_deployment

T = TypeVar("T")

#: Engine and ledger.
PAIRS: Final = (
    "embedded",
    pytest.param("redis+postgres", marks=[pytest.mark.redis, pytest.mark.postgres]),
    pytest.param("redis+sqlite", marks=pytest.mark.redis),
)


class Deployment(InProcess):
    """Engine and ledger, and the program in this process on both."""

    def __init__(self, url: str, ledger: str | None, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.url, self.ledger, self.namespace = url, ledger, namespace
        self._monkeypatch = monkeypatch
        given = {"HOLDFAST_URL": url, "HOLDFAST_LEDGER": ledger, "HOLDFAST_NAMESPACE": namespace}
        for name, value in (given | {"HOLDFAST_TOKEN": None}).items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    def do(self, work: Callable[[SampleDeployment], Awaitable[T]]) -> T:
        """With an app and a ledger that keeps up; the ledger has everything afterwards."""

        async def run() -> T:
            async with run_deployment(SampleDeployment(self.url, self.ledger, self.namespace)) as world:
                done = await work(world)
                if self.ledger is not None:
                    await world.wait_caught_up()
                return done

        return asyncio.run(run())

    def act_as(self, name: str, role: str, *tenants: str) -> None:
        """Call the program with a token of this principal from now on."""
        words = [word for tenant in tenants for word in ("--tenant", tenant)] or ["--all-tenants"]
        token = self.run("token", "create", name, "--role", role, *words).stdout.strip()
        self._monkeypatch.setenv("HOLDFAST_TOKEN", token)


def deployed(pair: str, request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """One of `PAIRS`, or `redis` without a ledger."""
    monkeypatch.chdir(folder)
    engine, _, ledger = pair.partition("+")
    namespace: str = request.getfixturevalue("namespace")
    if engine == "embedded":
        return Deployment(f"sqlite:///{folder}/jobs.db", None, namespace, monkeypatch)
    ledgers: dict[str, Any] = {"": lambda: None, "sqlite": lambda: f"sqlite:///{folder}/ledger.db"}
    ledgers["postgres"] = lambda: request.getfixturevalue("postgres_url")
    return Deployment(request.getfixturevalue("redis_url"), ledgers[ledger](), namespace, monkeypatch)
