"""Metrics and controls of real worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from holdfast import Settings, State
from holdfast.core.job import Envelope, new_job_ids
from holdfast.engine.port import Engine
from holdfast.engine.port.operators import QueueControl
from holdfast.factory import build_engine
from holdfast.verification.chaos.redis_nodes import quiet_port
from holdfast.verification.chaos.servers import free_port
from tests.cli.harness import SAMPLE_APP, Shell, environment, eventually
from tests.observe.support import fetch, samples

T = TypeVar("T")


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    (tmp_path / "sample.py").write_text(SAMPLE_APP)
    return Shell(tmp_path, environment(tmp_path))


def scrape_port(port: int) -> dict[str, float]:
    try:
        return samples(asyncio.run(fetch(port))[1])
    except ConnectionError:
        return {}


def with_engine(shell: Shell, work: Callable[[Engine], Awaitable[T]]) -> T:
    async def run() -> T:
        engine = build_engine(Settings.load(url=shell.environment["HOLDFAST_URL"]))
        await engine.open()
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def submit(shell: Shell, task: str, payload: bytes, number: int) -> None:
    envelopes = [Envelope(job_id=job_id, task=task, payload=payload) for job_id in new_job_ids(number)]
    with_engine(shell, lambda engine: engine.submit(envelopes))


def test_every_process_serves_its_own_metrics(shell: Shell) -> None:
    # Outside the range from which the system assigns ports, so the next one is free as well.
    port = quiet_port()
    words = ("worker", "sample.py:app", "--processes", "2", "--metrics-port", str(port))
    with shell.start(*words) as process:
        submit(shell, "add", b'{"a":1}', 4)

        def all_done() -> bool:
            done = [scrape_port(port + child).get('task_process_total{result="succeeded"}', -1) for child in (0, 1)]
            return min(done) >= 0 and sum(done) == 4

        eventually(all_done, what="both processes to count all jobs together")
        assert scrape_port(port)['active_workers{queue="default"}'] == 2
        assert process.logged(f"metrics on http://127.0.0.1:{port}/metrics")
        assert process.end() == 0


def test_upkeep_serves_metrics(shell: Shell) -> None:
    submit(shell, "add", b'{"a":1}', 1)
    port = free_port()
    with shell.start("upkeep", "--metrics-port", str(port)) as process:
        eventually(lambda: scrape_port(port).get('backlog{queue="default"}') == 1, what="its metrics")
        assert process.end() == 0


def test_a_port_in_use_is_reported(shell: Shell) -> None:
    port = free_port()
    with shell.start("upkeep", "--metrics-port", str(port)) as process:
        process.wait_log("metrics on")
        done = shell.run("upkeep", "--metrics-port", str(port), code=2)
    assert f"cannot serve metrics on 127.0.0.1:{port}" in done.stderr


def test_a_concurrency_change_reaches_all_running_workers_within_seconds(shell: Shell) -> None:
    words = ("worker", "sample.py:app", "--concurrency", "1")
    with shell.start(*words) as first, shell.start(*words, "--name", "green") as second:
        first.wait_log("started")
        second.wait_log("started")
        submit(shell, "slow", b'{"seconds":60}', 8)

        def running() -> int:
            async def count(engine: Engine) -> int:
                return (await engine.stats("default")).states.get(State.RUNNING, 0)

            return with_engine(shell, count)

        eventually(lambda: running() == 2, what="one job in each process")

        async def change(engine: Engine) -> None:
            await engine.set_control("default", QueueControl(worker_concurrency=3))

        with_engine(shell, change)
        eventually(lambda: running() == 6, what="three jobs in each process", within_s=10)
        for process in (first, second):
            assert process.logged("concurrency is now 3")
