"""Finding what a person named: a job in one of many queues, or the queues themselves."""

from __future__ import annotations

import getpass

from holdfast.core.job import JobView
from holdfast.engine.port import Engine
from holdfast.errors import UnknownJob


async def find_job(engine: Engine, job_id: str, queue: str | None) -> JobView:
    """The job, in the queue that was named or in any. Raises `UnknownJob`."""
    for name in await queues_or_all(engine, [queue] if queue else None):
        (view,) = await engine.get(name, [job_id])
        if view is not None:
            return view
    raise UnknownJob(job_id)


async def queues_or_all(engine: Engine, queues: list[str] | None) -> list[str]:
    """The queues that were named, or every queue that the engine knows."""
    return list(dict.fromkeys(queues)) if queues else await engine.queues()


def actor() -> str:
    """Who works at this terminal, for the record."""
    try:
        return f"cli:{getpass.getuser()}"
    except (OSError, KeyError):
        return "cli"
