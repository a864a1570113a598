"""The concurrency limit of a queue on SQLite, while several processes claim."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.core.job import Envelope
from holdfast.engine.port.operators import QueueControl
from holdfast.engine.sqlite.claims import ClaimCandidates, ReadyQueue, next_claimable
from holdfast.sqlite.transaction import Transaction
from tests.engine.sqlite.rig import open_engine


@pytest.mark.parametrize("several_tenants", [False, True])
@pytest.mark.parametrize(("read", "now"), [(None, 1), (5, 1), (5, None)])
async def test_a_limit_that_changed_after_the_claim_read_it_grants_nothing(
    tmp_path: Path, several_tenants: bool, read: int | None, now: int | None
) -> None:
    """A claim reads the controls before it has the write lock."""
    async with open_engine(tmp_path / "jobs.db") as engine:
        await engine.submit([Envelope(job_id=f"j{n}", task="t", payload=b"{}", tenant_id=f"t{n}") for n in range(3)])
        await engine.set_control("default", QueueControl(concurrency=now))

        def claim(concurrency: int | None) -> Callable[[Transaction], ClaimCandidates]:
            ready = ReadyQueue("default", True, several_tenants, None, None, concurrency)

            def step(transaction: Transaction) -> ClaimCandidates:
                transaction.begin()
                return next_claimable(transaction, ready, 3, 0, 1_000)

            return step

        assert (await engine.write(claim(read))).rows == []
        assert len((await engine.write(claim(now))).rows) == (now or 3)
