"""Effects in doubt, including those whose holder is lost, and the jobs suspended for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.core.job import MAX_BATCH, JobInfo
from holdfast.core.principal import Principal
from holdfast.core.states import OPERATOR_PREFIX, State
from holdfast.engine.port import OperationsPort
from holdfast.engine.port.reads import ReadPort
from holdfast.errors import EffectInDoubt, TransitionInvalid
from holdfast.ledger.port.effects import EffectState

if TYPE_CHECKING:
    from holdfast.ledger.queries.jobs import Queries
    from holdfast.ledger.queries.operators import EffectKeyRow


#: Limit for lists of keys that are reserved or in doubt; usually there are few.
MANY: Final = 10_000


async def with_lost_holders(engine: ReadPort, rows: Sequence[EffectKeyRow]) -> list[EffectKeyRow]:
    """Return the rows, with reserved keys whose holder is lost shown as in doubt; nothing is written."""
    reserved: dict[str, set[str]] = {}
    for row in rows:
        if row.state == EffectState.RESERVED:
            reserved.setdefault(row.queue, set()).add(row.job_id)
    views: dict[tuple[str, str], JobInfo] = {}
    for queue, job_ids in reserved.items():
        remaining = iter(job_ids)
        while batch := list(islice(remaining, MAX_BATCH)):
            views |= {(queue, view.job_id): view for view in await engine.get(queue, batch) if view is not None}
    return [_with_current_state(row, views.get((row.queue, row.job_id))) for row in rows]


def _with_current_state(row: EffectKeyRow, holder: JobInfo | None) -> EffectKeyRow:
    if row.state != EffectState.RESERVED:
        return row
    if holder is not None and (holder.state, holder.attempt, holder.worker) == (State.RUNNING, row.attempt, row.worker):
        return row
    reason = f"its holder is lost: attempt {row.attempt} of job {row.job_id} on {row.worker}"
    return msgspec.structs.replace(row, state=EffectState.IN_DOUBT.value, reason=reason)


async def resume_waiting(
    engine: OperationsPort, queries: Queries, row: EffectKeyRow, principal: Principal
) -> list[str]:
    """Resume every job that is suspended for this key, and no other; return their ids."""
    resumed = []
    for queue, job_id in dict.fromkeys([(row.queue, row.job_id), *await _find_suspended(queries, row)]):
        (view,) = await engine.get(queue, [job_id])
        if view is None or view.tenant_id != row.tenant_id or not _waits_for(view, row.key):
            continue
        reason = f"the effect {row.key!r} was resolved"
        try:
            await engine.move(
                queue,
                job_id,
                State.QUEUED,
                actor=principal.name,
                reason=reason,
                expected=State.SUSPENDED,
                audit=f"{OPERATOR_PREFIX}resume",
            )
        except TransitionInvalid:
            # Another operator has moved it.
            continue
        resumed.append(job_id)
    return resumed


def _waits_for(view: JobInfo, key: str) -> bool:
    failure = view.failure
    if view.state is not State.SUSPENDED or failure is None or failure.code != EffectInDoubt.code:
        return False
    return EffectInDoubt.named(key) in failure.message


async def _find_suspended(queries: Queries, row: EffectKeyRow) -> list[tuple[str, str]]:
    """Return queue and id of the tenant's jobs that are suspended for an effect, from the ledger."""
    from holdfast.ledger.queries.job_list import JobFilter
    from holdfast.ledger.queries.paging import MAX_LIMIT

    filters = JobFilter(states=frozenset({State.SUSPENDED}), tenant_id=row.tenant_id)
    found: list[tuple[str, str]] = []
    cursor: str | None = None
    while True:
        page = await queries.jobs(filters, MAX_LIMIT, cursor)
        found += [(job.queue, job.job_id) for job in page.jobs if job.error_code == EffectInDoubt.code]
        cursor = page.cursor
        if cursor is None:
            return found
