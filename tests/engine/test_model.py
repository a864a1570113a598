"""Random histories against the model, on every engine.

Every run has the same examples. `HOLDFAST_TEST_MODEL_EXAMPLES=20000` searches for new ones, and prints how to repeat a
failure.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from holdfast.engine.port import Engine
from holdfast.engine.port.jobs import RetryVia
from holdfast.testing.state_machine import OPTIONS, World, engine_machine
from tests.engine.harness import RedisHarness, SqliteHarness

EXAMPLES: Final = int(os.environ.get("HOLDFAST_TEST_MODEL_EXAMPLES", "1000"))
STEPS: Final = 40

T = TypeVar("T")


class RetryViaByQueueName(Mapping[str, RetryVia]):
    """Each example has its own queue; the queue's name selects where its retries wait."""

    def __getitem__(self, queue: str) -> RetryVia:
        return RetryVia.PENDING if queue.startswith("pending") else RetryVia.SCHEDULE

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 1


class EngineRig(World):
    """One store and its engines, on a separate event loop."""

    def __init__(self, harness: SqliteHarness | RedisHarness, runner: asyncio.Runner) -> None:
        self._harness = harness
        self._runner = runner

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        # `Runner.run` would install a handler for Ctrl-C each time, which takes as long as a small step.
        return self._runner.get_loop().run_until_complete(work)

    async def make(self, *, ledger: bool) -> Engine:
        return await self._harness.make(**OPTIONS, ledger=ledger, retry_via=RetryViaByQueueName())

    async def advance(self, queue: str, ms: int) -> None:
        if isinstance(self._harness, RedisHarness):
            await self._harness.age_queue(queue, ms)
        else:
            await self._harness.advance(ms)


def explore(harness: SqliteHarness | RedisHarness, examples: int) -> None:
    searching = "HOLDFAST_TEST_MODEL_EXAMPLES" in os.environ
    with asyncio.Runner() as runner:
        try:
            run_state_machine_as_test(
                engine_machine(EngineRig(harness, runner)),
                settings=settings(
                    max_examples=examples,
                    stateful_step_count=STEPS,
                    deadline=None,
                    derandomize=not searching,
                    print_blob=True,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            runner.run(harness.close())


@pytest.mark.search
@pytest.mark.timeout(1_800)
def test_sqlite_agrees_with_the_model(tmp_path: Path) -> None:
    # The disk is not under test: 75,000 commits need not wait for it.
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        explore(SqliteHarness(Path(folder) / "holdfast.db"), EXAMPLES)


@pytest.mark.search
@pytest.mark.redis
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    ("server", "examples"),
    [("redis_url", EXAMPLES), ("redis_62_url", EXAMPLES // 10), ("redis_60_url", EXAMPLES // 10)],
)
def test_redis_agrees_with_the_model(request: pytest.FixtureRequest, server: str, examples: int) -> None:
    explore(RedisHarness(request.getfixturevalue(server), f"model-{secrets.token_hex(4)}"), examples)
