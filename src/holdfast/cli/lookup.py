"""Finding what a person named: a job in one of many queues, or the queues themselves."""

from __future__ import annotations

from holdfast.core.job import JobView
from holdfast.core.person import Person
from holdfast.engine.port import Engine
from holdfast.errors import UnknownJob


async def find_job(engine: Engine, job_id: str, queue: str | None, person: Person) -> JobView:
    """The job, in the queue that was named or in any. Raises `UnknownJob`, also for one of another tenant."""
    for name in await queues_or_all(engine, [queue] if queue else None):
        (view,) = await engine.get(name, [job_id])
        if view is not None and person.sees(view.tenant_id):
            return view
    raise UnknownJob(job_id)


async def queues_or_all(engine: Engine, queues: list[str] | None) -> list[str]:
    """The queues that were named, or every queue that the engine knows."""
    return list(dict.fromkeys(queues)) if queues else await engine.queues()
