"""Apps on a separate SQLite file, with a manual clock or with faults."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast, factory
from holdfast import factory as ledgers
from holdfast.clock import Clock
from holdfast.engine.port import Engine
from holdfast.settings import Settings
from holdfast.testing.inline import ManualClock
from tests.worker.support import Faults, FaultyEngine


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'holdfast.db'}"


@pytest.fixture
async def app(url: str, clock: ManualClock) -> AsyncIterator[Holdfast]:
    """Leases last 30 s of the manual clock; heartbeats come every 50 ms of real time."""
    made = Holdfast(url, clock=clock, heartbeat_interval_s=0.05, reclaim_interval_s=0.05)
    yield made
    await made.close()


@pytest.fixture
async def both(engine_url: str, namespace: str) -> AsyncIterator[Holdfast]:
    """An app with the real clock, on each engine."""
    made = Holdfast(engine_url, namespace=namespace, heartbeat_interval_s=0.1, reclaim_interval_s=0.1)
    yield made
    await made.close()


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Faults of all engines that apps build from now on."""
    faults, build, build_ledger = Faults(), factory.build_engine, ledgers.build_ledger

    def build_faulty(settings: Settings, *rest: Any) -> Engine:
        return FaultyEngine(build(settings, *rest), faults)

    def build_real_ledger(settings: Settings, engine: FaultyEngine, clock: Clock) -> Any:
        return build_ledger(settings, engine.real, clock)

    monkeypatch.setattr(factory, "build_engine", build_faulty)
    monkeypatch.setattr(ledgers, "build_ledger", build_real_ledger)
    return faults
