"""A webhook receiver, and the pairs of stores that deliver to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.webhooks.receiver import Receiver, run_receiver


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with run_receiver() as receiver:
        yield receiver


@pytest.fixture(params=["embedded", "redis+postgres", "redis+sqlite"])
def stores(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> dict[str, Any]:
    if request.param == "embedded":
        return {"url": f"sqlite:///{tmp_path / 'holdfast.db'}"}
    url: str = request.getfixturevalue("redis_url")
    ledger = (
        request.getfixturevalue("postgres_url") if "postgres" in request.param else f"sqlite:///{tmp_path / 'l.db'}"
    )
    return {"url": url, "ledger": ledger, "namespace": namespace}
