"""Asking all queues, where some may be on a server that does not answer (decision 0018)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.core.job import JobView
from holdfast.core.person import Person
from holdfast.engine.port import Engine
from holdfast.errors import EngineUnavailable


async def find_among(engine: Engine, queues: Iterable[str], job_id: str, person: Person) -> JobView | None:
    """The job, if one of these queues has it and the person may see it.

    Raises `EngineUnavailable` if it may be in one that does not answer.
    """
    found: JobView | None = None

    async def look(queue: str) -> None:
        nonlocal found
        if found is None:
            (view,) = await engine.get(queue, [job_id])
            found = view if view is not None and person.sees(view.tenant_id) else None

    _, away = await engine.reach(queues, look)
    if found is None and away:
        raise unreached(away)
    return found


def unreached(away: Mapping[str, EngineUnavailable]) -> EngineUnavailable:
    """Which queues did not answer, and why the first of them did not."""
    return EngineUnavailable(f"no answer for {', '.join(sorted(away))}: {next(iter(away.values()))}")
