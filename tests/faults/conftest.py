"""Sites for fault tests: on both engines, on the shared Redis, or on a separate Redis that the test may break."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faults import sample
from tests.faults.support import Site

MakeSite = Callable[..., Site]


@pytest.fixture
async def make_site(tmp_path: Path, namespace: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MakeSite]:
    """Create sites: `make_site(url, visibility_timeout_s=5)`. Processes and apps end with the test."""
    monkeypatch.setenv(sample.RUNS_VARIABLE, str(tmp_path / "runs.log"))
    async with AsyncExitStack() as stack:

        def make(url: str, **settings: Any) -> Site:
            site = Site(url, tmp_path, **{"namespace": namespace, **settings})
            stack.push_async_callback(site.close)
            return site

        yield make


@pytest.fixture
def site(engine_url: str, make_site: MakeSite) -> Site:
    """A site on each engine."""
    return make_site(engine_url)


@pytest.fixture
def redis_site(redis_url: str, make_site: MakeSite) -> Site:
    """A site on the shared Redis, for tests that do not break the server."""
    return make_site(redis_url)


@pytest.fixture
def sqlite_site(tmp_path: Path, make_site: MakeSite) -> Site:
    return make_site(f"sqlite:///{tmp_path / 'holdfast.db'}")
