"""Who looks after dead letters."""

from __future__ import annotations

from typing import Any

from holdfast.core.job import Envelope, Receipt
from holdfast.errors import EngineUnavailable
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.operators import DeadLetterStatus
from holdfast.ledger.queries.operator_filters import DeadLetterFilter
from holdfast.operations.dead_letters import DeadLetterOperations
from tests.operations.deployment import ADA, World

EVERY = DeadLetterFilter()


class Broken:
    """A desk that dies before or after the engine has the job."""

    def __init__(self, world: World, *, after: bool = False) -> None:
        self._world = world
        self._after = after

    async def submit(self, envelope: Envelope) -> Receipt:
        if self._after:
            await self._world.app.engine.submit([envelope])
        raise EngineUnavailable("the line went dead")


def office(world: World, desk: Any = None) -> DeadLetterOperations:
    ledger = backend_of(world.app).ledger
    assert ledger is not None
    return DeadLetterOperations(world.app.engine, ledger, desk) if desk else world.offices.dead_letters


async def status(world: World, dlq_id: str) -> DeadLetterStatus:
    return (await office(world).show(ADA, dlq_id)).status


async def jobs_of(world: World) -> set[str]:
    await world.caught_up()
    return {row.job_id for row in (await world.app.ledger.queries.jobs(limit=1_000)).jobs}
