"""Helpers for tests of dead letters."""

from __future__ import annotations

from typing import Any

from holdfast.core.job import Envelope, Receipt
from holdfast.errors import EngineUnavailable
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.operators import DeadLetterStatus
from holdfast.ledger.queries.operator_filters import DeadLetterFilter
from holdfast.operations.dead_letters import DeadLetterOperations
from tests.operations.deployment import ADA, SampleDeployment

EVERY = DeadLetterFilter()


class FailingSubmitter:
    """A submitter that fails before or after the engine has the job."""

    def __init__(self, deployment: SampleDeployment, *, after: bool = False) -> None:
        self._deployment = deployment
        self._after = after

    async def submit(self, envelope: Envelope) -> Receipt:
        if self._after:
            await self._deployment.app.engine.submit([envelope])
        raise EngineUnavailable("the connection was lost")


def get_operations(deployment: SampleDeployment, submitter: Any = None) -> DeadLetterOperations:
    ledger = backend_of(deployment.app).ledger
    assert ledger is not None
    return (
        DeadLetterOperations(deployment.app.engine, ledger, submitter)
        if submitter
        else deployment.operations.dead_letters
    )


async def get_status(deployment: SampleDeployment, dlq_id: str) -> DeadLetterStatus:
    return (await get_operations(deployment).show(ADA, dlq_id)).status


async def list_job_ids(deployment: SampleDeployment) -> set[str]:
    await deployment.wait_caught_up()
    return {row.job_id for row in (await deployment.app.ledger.queries.jobs(limit=1_000)).jobs}
