"""Findings of `holdfast doctor` that do not depend on the kind of engine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from holdfast import Settings
from holdfast.cli.commands.doctor import examine
from holdfast.core.job import Envelope
from holdfast.engine.port import Engine
from holdfast.engine.port.operators import QueueControl
from holdfast.engine.port.reads import Finding
from holdfast.factory import build_engine
from holdfast.testing import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_ms=time.time_ns() // 1_000_000)


@pytest.fixture
async def engine(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Engine]:
    engine = build_engine(Settings.load(url=f"sqlite:///{tmp_path}/jobs.db"), clock)
    await engine.open()
    await engine.submit([Envelope(job_id="a" * 32, task="t", payload=b"{}")])
    yield engine
    await engine.close()


async def get_finding(engine: Engine, check: str) -> Finding:
    (found,) = [one for one in await examine(engine, None) if one.check == check]
    return found


async def test_an_engine_with_another_clock_is_a_warning(engine: Engine, clock: ManualClock) -> None:
    clock.advance(timedelta(minutes=90))
    found = await get_finding(engine, "clock")
    assert (found.ok, found.warning) == (False, True)
    assert "1.5 h ahead of this machine's" in found.message
    assert "chrony" in found.remedy
    clock.jump(clock.now_ms() - 3 * 3_600_000)
    assert "1.5 h behind this machine's" in (await get_finding(engine, "clock")).message


async def test_jobs_without_a_worker_are_a_warning_until_one_claims(engine: Engine) -> None:
    waiting = await get_finding(engine, "queue default")
    assert (waiting.ok, waiting.warning) == (False, True)
    assert "1 job waiting, no workers" in waiting.message
    await engine.claim("w1", ["default"], 1, 0)
    assert (await get_finding(engine, "queue default")).ok


async def test_a_paused_queue_is_a_warning(engine: Engine) -> None:
    await engine.set_control("default", QueueControl(paused=True))
    found = await get_finding(engine, "queue default")
    assert (found.ok, found.warning) == (False, True)
    assert found.remedy == "holdfast queues resume default"


async def test_a_queue_at_its_concurrency_limit_is_named(engine: Engine) -> None:
    await engine.submit([Envelope(job_id="b" * 32, task="t", payload=b"{}")])
    await engine.set_control("default", QueueControl(concurrency=1))
    await engine.claim("w1", ["default"], 5, 0)
    found = await get_finding(engine, "queue default")
    assert found.ok
    assert found.message == "1 job waiting, 1 worker; at its concurrency limit, 1 of 1 running"
    await engine.set_control("default", QueueControl(concurrency=2))
    assert (await get_finding(engine, "queue default")).message == "1 job waiting, 1 worker"
    # Nothing will run before an operator changes it.
    await engine.set_control("default", QueueControl(concurrency=0))
    found = await get_finding(engine, "queue default")
    assert (found.ok, found.warning, found.remedy) == (False, True, "holdfast queues concurrency default N")
