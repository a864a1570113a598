"""Deployments of the HTTP service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http.deployment import Deployment, sample, serving


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """Embedded, without a worker: jobs stay queued."""
    app = sample(f"sqlite:///{tmp_path / 'jobs.db'}", http_body_limit=200_000, payload_limit=50_000)
    with serving(app, upkeep=False, run_endpoint=True) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The same, for tests that do not depend on each other's changes."""
    file = tmp_path_factory.mktemp("shared") / "jobs.db"
    app = sample(f"sqlite:///{file}", http_body_limit=200_000, payload_limit=50_000)
    with serving(app, upkeep=False, run_endpoint=True) as deployment:
        yield deployment


@pytest.fixture(
    params=[
        "embedded",
        pytest.param("redis+postgres", marks=[pytest.mark.redis, pytest.mark.postgres]),
        pytest.param("redis+sqlite", marks=pytest.mark.redis),
    ]
)
def on_all_stores(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> Iterator[Deployment]:
    """On every pair of stores, with a worker in the same process."""
    settings = {"url": f"sqlite:///{tmp_path / 'jobs.db'}"}
    if request.param != "embedded":
        postgres = request.param == "redis+postgres"
        ledger = request.getfixturevalue("postgres_url") if postgres else f"sqlite:///{tmp_path / 'ledger.db'}"
        settings = {"url": request.getfixturevalue("redis_url"), "ledger": ledger, "namespace": namespace}
    with serving(sample(**settings), worker=True, upkeep=True, run_endpoint=True) as deployment:
        yield deployment


@pytest.fixture
def working(tmp_path: Path) -> Iterator[Deployment]:
    """Embedded, with a worker in the same process."""
    with serving(sample(f"sqlite:///{tmp_path / 'jobs.db'}"), worker=True, upkeep=True) as deployment:
        yield deployment
