"""Metrics of many queues: as many as the setting says are named, the others are added up."""

from __future__ import annotations

import pytest

from holdfast import Holdfast
from holdfast.core.job import DEFAULT_TENANT, Envelope, new_job_ids
from holdfast.execution.backend import backend_of
from holdfast.operations.metrics import select_queues
from tests.observe.support import scrape


async def test_the_other_queues_are_added_up(engine_url: str, namespace: str) -> None:
    async with Holdfast(engine_url, namespace=namespace, metrics_queue_limit=3) as app:
        names = [*(f"g{number}" for number in range(5)), "s0", "s1", "other"]
        envelopes = [
            Envelope(job_id=job_id, task="x", payload=b"{}", queue=queue, tenant_id=queue[0])
            for queue in names
            for job_id in new_job_ids(2)
        ]
        await backend_of(app).engine.submit(envelopes)
        found = await scrape(app)
    backlogs = {key: value for key, value in found.items() if key.startswith("backlog{")}
    # Of each tenant in turn the first; a queue with the name of the sum is part of it.
    assert backlogs == {
        'backlog{queue="g0"}': 2,
        'backlog{queue="g1"}': 2,
        'backlog{queue="s0"}': 2,
        'backlog{queue="other"}': 10,
    }
    assert found['jobs{queue="other",state="queued"}'] == 10
    assert found['stream_length{stream="other"}'] == 10


@pytest.mark.parametrize(
    ("limit", "named"),
    [
        (9, {"default", "g0", "g1", "g2", "s0", "s1", "t0"}),
        (5, {"default", "g0", "g1", "s0", "t0"}),
        (3, {"default", "g0", "s0"}),
        (0, set()),
    ],
)
def test_a_tenant_with_many_queues_does_not_displace_others(limit: int, named: set[str]) -> None:
    owners = {"g0": "g", "g1": "g", "g2": "g", "s0": "s", "s1": "s", "t0": DEFAULT_TENANT}
    assert select_queues(sorted([*owners, "default"]), owners, limit) == named
