"""A service for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http.deployment import World, sample, serving


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Embedded, without a worker: jobs stay where they are put."""
    app = sample(f"sqlite:///{tmp_path / 'jobs.db'}", http_body_limit=200_000, payload_limit=50_000)
    with serving(app, upkeep=False, run_endpoint=True) as world:
        yield world


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The same for tests that change nothing, or nothing that another one minds."""
    place = tmp_path_factory.mktemp("shared") / "jobs.db"
    app = sample(f"sqlite:///{place}", http_body_limit=200_000, payload_limit=50_000)
    with serving(app, upkeep=False, run_endpoint=True) as world:
        yield world


@pytest.fixture
def working(tmp_path: Path) -> Iterator[World]:
    """Embedded, with a worker in the same process."""
    with serving(sample(f"sqlite:///{tmp_path / 'jobs.db'}"), worker=True, upkeep=True) as world:
        yield world
