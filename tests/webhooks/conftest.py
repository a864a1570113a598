"""A receiver, and the kinds of stores that can deliver to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.webhooks.receiver import Receiver, receiving


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


@pytest.fixture(params=["embedded", "redis+postgres", "redis+sqlite"])
def stores(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> dict[str, Any]:
    if request.param == "embedded":
        return {"url": f"sqlite:///{tmp_path / 'holdfast.db'}"}
    url: str = request.getfixturevalue("redis_url")
    kept = request.getfixturevalue("postgres_url") if "postgres" in request.param else f"sqlite:///{tmp_path / 'l.db'}"
    return {"url": url, "ledger": kept, "namespace": namespace}
