"""`/internal/tasks/stats` (requirement H2) and the run endpoint (requirement H3)."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from holdfast.core.person import Right
from holdfast.core.states import State
from holdfast.errors import StaleLease, TransitionInvalid, Unknown, UnknownJob
from holdfast.http.asgi import Reply
from holdfast.http.operation import Answer, Call, operation
from holdfast.http.wire import Job, JobDetail, QueueQuery, Request, job_of_row, job_of_view
from holdfast.ledger.listing import JobFilter
from holdfast.people.scope import scope

_TAG: Final = "internal"


class StatsQuery(Request, frozen=True, kw_only=True):
    """How many of the latest jobs."""

    latest: Annotated[int, Meta(ge=0, le=200)] = 20


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs by state, and the newest ones."""

    states: dict[State, int]
    #: Counts of these states are the planner's guess.
    estimated: list[State]
    latest: list[Job]


class RunQuery(QueueQuery, frozen=True, kw_only=True):
    """How it is to end: as the task says, unless a failure is asked for."""

    force_fail: Annotated[bool, Meta(description="Straight to the dead letter.")] = False
    transient_fail: Annotated[bool, Meta(description="One failure that may be retried.")] = False


@operation(
    "GET",
    "/internal/tasks/stats",
    "taskStats",
    tag=_TAG,
    query=StatsQuery,
    answers={200: Answer("Counts and the latest jobs.", Stats)},
)
async def stats(call: Call) -> Reply:
    """Jobs by state, and the latest ones; of the token's tenants, from the ledger."""
    query: StatsQuery = call.query
    queries, tenants = call.service.queries, scope(call.person)
    states: dict[State, int] = dict.fromkeys(State, 0)
    estimated: set[State] = set()
    for tenant in (None,) if tenants is None else tenants:
        counts = await queries.counts(tenant)
        estimated |= counts.estimated
        for state, count in counts.states.items():
            states[state] += count
    latest = (await queries.jobs(JobFilter(tenants=tenants), query.latest)).jobs if query.latest else []
    return Reply(Stats(states=states, estimated=sorted(estimated), latest=[job_of_row(row) for row in latest]))


@operation(
    "POST",
    "/api/v1/internal/jobs/{job_id}/run",
    "runJob",
    tag=_TAG,
    right=Right.OPERATE,
    query=RunQuery,
    answers={200: Answer("The job after one attempt.", JobDetail)},
    errors=(UnknownJob, TransitionInvalid, StaleLease),
)
async def run(call: Call) -> Reply:
    """Run one job here and now, whether it is due or not.

    Off unless the setting `run_endpoint` is on. It takes a lease like a worker, and settles like one: a failure that is
    asked for with `transient_fail` is retried as the task's policy says, and given up when that is exhausted.
    """
    if not call.service.run_endpoint:
        raise Unknown("operation", "runJob: it is switched off (HOLDFAST_RUN_ENDPOINT)")
    query: RunQuery = call.query
    view = await call.service.offices.operating.locate(call.person, call.path["job_id"], query.queue)
    after = await call.service.bench.run(
        view, call.person.name, force_fail=query.force_fail, transient_fail=query.transient_fail
    )
    return Reply(job_of_view(after))
