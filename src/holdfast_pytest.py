"""The pytest plugin of holdfast (entry point `pytest11`): an app in memory, its clock and its worker.

    @pytest.fixture
    def holdfast_base_app():            # in conftest.py
        from shop.tasks import app
        return app

    async def test_a_refund(holdfast_worker):
        job = await refund.submit("order-7")
        await holdfast_worker.drain()
        assert await job.result(0) == "refunded"

Every pytest run in an environment with holdfast loads this module, so it imports holdfast only where a fixture is used.
The fixtures are plain ones: they work with pytest-asyncio, with anyio and without either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from holdfast import Holdfast
    from holdfast.testing import InMemoryWorker, ManualClock


@pytest.fixture
def holdfast_clock() -> ManualClock:
    """The clock of `holdfast_app`: stands still until `advance(…)`."""
    from holdfast.testing import ManualClock

    return ManualClock()


@pytest.fixture
def holdfast_base_app() -> Holdfast:
    """The app that `holdfast_app` moves into memory. Override it to return your own."""
    from holdfast import Holdfast

    return Holdfast("sqlite://")


@pytest.fixture
def holdfast_app(holdfast_base_app: Holdfast, holdfast_clock: ManualClock) -> Iterator[Holdfast]:
    """Your app for one test: in memory, on `holdfast_clock`, without its configured stores."""
    with holdfast_base_app.configure(url="sqlite://", clock=holdfast_clock) as app:
        yield app


@pytest.fixture
def holdfast_worker(holdfast_app: Holdfast, holdfast_clock: ManualClock) -> InMemoryWorker:
    """A worker that runs due jobs: `await holdfast_worker.drain()`, or `drain_sync()`."""
    from holdfast.testing import InMemoryWorker

    return InMemoryWorker(holdfast_app, holdfast_clock)
