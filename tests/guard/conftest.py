"""Apps with guards: embedded in SQLite, and on Redis with PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast

MakeApp = Callable[..., Holdfast]


@pytest.fixture(params=["embedded", "separate"])
def stores(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> dict[str, Any]:
    """Settings of the two kinds of deployment that have a ledger."""
    if request.param == "embedded":
        return {"url": f"sqlite:///{tmp_path / 'holdfast.db'}"}
    return {
        "url": request.getfixturevalue("redis_url"),
        "ledger": request.getfixturevalue("postgres_url"),
        "namespace": namespace,
    }


@pytest.fixture
async def make_app() -> AsyncIterator[MakeApp]:
    """Build apps that are closed after the test."""
    apps: list[Holdfast] = []

    def make(**settings: Any) -> Holdfast:
        app = Holdfast(**{"heartbeat_interval_s": 0.1, "reclaim_interval_s": 0.1, **settings})
        apps.append(app)
        return app

    yield make
    for app in apps:
        await app.close()


@pytest.fixture
def app(stores: dict[str, Any], make_app: MakeApp) -> Holdfast:
    """One app on each pair of stores."""
    return make_app(**stores)


@pytest.fixture
def app_without_ledger(redis_url: str, namespace: str, make_app: MakeApp) -> Holdfast:
    """An app on Redis without a ledger."""
    return make_app(url=redis_url, namespace=namespace)
