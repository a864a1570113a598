"""Helpers for tests of approvals: principals, votes, and changes behind the engine's back."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

from redis.asyncio import Redis

from holdfast import Holdfast, Job
from holdfast.core.principal import ALL_TENANTS, Principal, Role
from holdfast.ledger.port.operators import ApprovalRow, ApprovalStatus
from holdfast.operations.operations import Operations
from tests.worker.support import eventually

EVERY_TENANT = frozenset({ALL_TENANTS})


def principal(name: str, role: Role = Role.APPROVER, *tenants: str, verified: bool = True) -> Principal:
    return Principal(name=name, role=role, tenants=frozenset(tenants) or EVERY_TENANT, verified=verified)


ANN, BOB, CYD = principal("ann"), principal("bob"), principal("cyd")


async def wait_approval(app: Holdfast, job: Job[Any], status: ApprovalStatus = ApprovalStatus.REQUESTED) -> ApprovalRow:
    """Wait until the ledger has an approval request of the job with this status."""
    approvals = Operations.for_app(app).approvals

    async def read() -> ApprovalRow | None:
        rows = [row for row in (await approvals.list(ANN)).approvals if row.job_id == job.id]
        return next((row for row in rows if row.status is status), None)

    found: ApprovalRow = await eventually(read, f"an approval that is {status}")
    return found


async def vote(
    app: Holdfast, voter: Principal, approval_id: str, *, approve: bool = True, reason: str = ""
) -> ApprovalRow:
    return await Operations.for_app(app).approvals.vote(voter, approval_id, approve=approve, reason=reason)


async def event_types(app: Holdfast, job: Job[Any], tenant_id: str = "default") -> list[str]:
    """The types of the job's events in the ledger."""
    from holdfast.core.job import JobKey

    await app.ledger.wait_caught_up()
    return [event.type for event in await app.ledger.queries.events(JobKey(tenant_id, job.queue, job.id))]


async def change_in_store(app: Holdfast, job: Job[Any], before: str, after: str) -> None:
    """Change the amount of a waiting job directly in the store; both texts have the same length."""
    assert len(before) == len(after)
    # With its name: an id may contain the same digits.
    before, after = f'"amount":{before}', f'"amount":{after}'
    if app.settings.url.startswith("sqlite"):
        with closing(sqlite3.connect(app.settings.url.removeprefix("sqlite:///"), timeout=20)) as connection:
            changed = connection.execute(
                "UPDATE jobs SET payload = replace(payload, ?, ?) WHERE job_id = ?", (before, after, job.id)
            ).rowcount
            connection.commit()
    else:
        changed = await _change_in_redis(app, job, before.encode(), after.encode())
    assert changed == 1


async def _change_in_redis(app: Holdfast, job: Job[Any], before: bytes, after: bytes) -> int:
    client: Any = Redis.from_url(app.settings.url)
    async with client as redis:
        key = f"{app.settings.namespace}:job:{job.id}".encode()
        kind = await redis.type(key)
        if kind == b"string":
            record = await redis.get(key)
            await redis.set(key, record.replace(before, after), keepttl=True)
            return int(before in record)
        fields = await redis.hgetall(key)
        for name, value in fields.items():
            if before in value:
                await redis.hset(key, name, value.replace(before, after))
                return 1
    return 0
