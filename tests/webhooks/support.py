"""Apps that send webhooks, and queries for their deliveries."""

from __future__ import annotations

from typing import Any

from holdfast import Fatal, Holdfast
from holdfast.core.states import State
from holdfast.ledger.queries.job_list import JobFilter
from holdfast.webhooks.deliveries import QUEUE
from tests.webhooks.receiver import SECRET


def make_app(stores: dict[str, Any], **settings: Any) -> Holdfast:
    options: dict[str, Any] = {
        "webhook_secret": SECRET,
        "webhook_allow": ["127.0.0.1"],
        "webhook_backoff_s": 0.05,
    } | settings
    app = Holdfast(**stores, **options)

    @app.task
    async def add(a: int, b: int) -> int:
        return a + b

    @app.task
    async def fail(words: str) -> None:
        raise Fatal(words)

    return app


async def list_deliveries(app: Holdfast, state: State | None = None) -> list[Any]:
    job_filter = JobFilter(queues=frozenset({QUEUE}), states=frozenset({state} if state else ()))
    return list((await app.ledger.queries.jobs(job_filter, limit=100)).jobs)
