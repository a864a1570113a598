"""Finding what a person named: a job in one of many queues, or the queues themselves."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from holdfast.core.job import JobView
from holdfast.core.person import Person
from holdfast.engine.port import Engine, PartlyDone
from holdfast.errors import UnknownJob
from holdfast.people.reaching import find_among

T = TypeVar("T")


async def find_job(engine: Engine, job_id: str, queue: str | None, person: Person) -> JobView:
    """The job, in the queue that was named or in any. Raises `UnknownJob`, also for one of another tenant."""
    names = await queues_or_all(engine, [queue] if queue else None)
    if (view := await find_among(engine, names, job_id, person)) is None:
        raise UnknownJob(job_id)
    return view


async def queues_or_all(engine: Engine, queues: list[str] | None) -> list[str]:
    """The queues that were named, or every queue that the engine knows."""
    return list(dict.fromkeys(queues)) if queues else await engine.queues()


async def as_far_as_known(answer: Awaitable[list[T]]) -> tuple[list[T], PartlyDone | None]:
    """A list, and what to raise once it is shown: some of it is missing, because a server does not answer."""
    try:
        return await answer, None
    except PartlyDone as exc:
        return exc.done, exc
