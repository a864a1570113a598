"""Apps that people watch over: embedded in SQLite, and on Redis with PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast

MakeApp = Callable[..., Holdfast]


@pytest.fixture(params=["embedded", "apart"])
def stores(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> dict[str, Any]:
    """Settings of the two ways to run with a ledger."""
    if request.param == "embedded":
        return {"url": f"sqlite:///{tmp_path / 'holdfast.db'}"}
    return {
        "url": request.getfixturevalue("redis_url"),
        "ledger": request.getfixturevalue("postgres_url"),
        "namespace": namespace,
    }


@pytest.fixture
async def make_app() -> AsyncIterator[MakeApp]:
    """Apps that are closed at the end."""
    made: list[Holdfast] = []

    def make(**settings: Any) -> Holdfast:
        app = Holdfast(**{"heartbeat_interval_s": 0.1, "reclaim_interval_s": 0.1, **settings})
        made.append(app)
        return app

    yield make
    for app in made:
        await app.close()


@pytest.fixture
def app(stores: dict[str, Any], make_app: MakeApp) -> Holdfast:
    """Once on each."""
    return make_app(**stores)


@pytest.fixture
def lonely(redis_url: str, namespace: str, make_app: MakeApp) -> Holdfast:
    """On Redis, without a ledger."""
    return make_app(url=redis_url, namespace=namespace)
