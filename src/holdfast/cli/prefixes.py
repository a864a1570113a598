"""Ids as a person gives them: whole, or a prefix of at least twelve characters that one id alone begins with.

A whole id wins. A prefix is looked up in the ledger, among what the person may see; without a ledger there is no index
to ask, and ids have to be whole. Commands that take several ids take whole ones: a list comes from a program.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, TypeVar

from holdfast.cli.event_view import iso
from holdfast.cli.output import emit_rows
from holdfast.errors import AmbiguousId, NotFound, UnknownJob
from holdfast.operations.access import visible_tenants

if TYPE_CHECKING:
    from holdfast.core.principal import Principal
    from holdfast.ledger.queries.jobs import Queries
    from holdfast.operations.operations import Operations


T = TypeVar("T")

#: The millisecond in which holdfast made the id: with fewer characters nearly everything would match.
SHORTEST: Final = 12
#: Characters of an id that holdfast makes.
_WHOLE: Final = 32
#: Candidates that are listed.
_LISTED: Final = 10
#: What the instant of a candidate is.
_WHEN: Final = {"job": "created", "approval": "requested", "dead letter": "failed"}


async def abbreviated(
    queries: Queries | None,
    noun: str,
    person: Principal,
    text: str,
    act: Callable[[str], Awaitable[T]],
    *,
    queue: str | None = None,
    tenant: str | None = None,
) -> T:
    """What `act` gives for this id or, if there is none, for the only id that begins so.

    `act` raises `UnknownJob` or `Unknown` for an id that is not there, and has changed nothing then; so does this.
    Raises `AmbiguousId` after the candidates are listed on stderr.
    """
    try:
        return await act(text)
    except (UnknownJob, NotFound):
        found, advice = None, ""
        if queries is None:
            advice = "there is no ledger to find a prefix in, so give the whole id" if len(text) < _WHOLE else ""
        elif len(text) < SHORTEST:
            advice = f"a prefix of an id needs at least {SHORTEST} characters"
        else:
            found = await _only(queries, noun, person, text, queue, tenant)
        if found is None:
            raise (UnknownJob(text, advice) if noun == "job" else NotFound(noun, text, advice)) from None
    return await act(found)


async def whole_job_ids(offices: Operations, person: Principal, ids: list[str], queue: str | None = None) -> list[str]:
    """These ids; one alone may be a prefix."""
    if len(ids) != 1:
        return ids
    view = await abbreviated(
        queries_of(offices),
        "job",
        person,
        ids[0],
        lambda job_id: offices.operating.find(person, job_id, queue),
        queue=queue,
    )
    return [view.job_id]


async def whole_dead_letter_ids(offices: Operations, person: Principal, ids: list[str]) -> list[str]:
    """The same for dead letters."""
    if len(ids) != 1:
        return ids
    letters = offices.dead_letters
    letter = await abbreviated(
        queries_of(offices), "dead letter", person, ids[0], lambda dlq_id: letters.show(person, dlq_id)
    )
    return [letter.dlq_id]


def queries_of(offices: Operations) -> Queries | None:
    """The ledger's queries; None without a ledger."""
    return None if offices.ledger is None else offices.ledger.queries


async def _only(
    queries: Queries, noun: str, person: Principal, prefix: str, queue: str | None, tenant: str | None
) -> str | None:
    """The only id that begins so; None if there is none. Raises `AmbiguousId`."""
    tenants = visible_tenants(person)
    if tenant is not None:
        tenants = (tenant,) if person.can_see(tenant) else ()
    found = await queries.by_prefix(noun, prefix, tenants, queue, _LISTED + 1)
    if len(found) <= 1:
        return found[0].id if found else None
    listed = found[:_LISTED]
    rows = [(one.id, one.task, one.state, iso(one.at) or "") for one in listed]
    emit_rows((noun, "task", "state", _WHEN[noun]), rows, empty="", texts=0, out=sys.stderr)
    raise AmbiguousId(noun, prefix, len(listed), more=len(found) > len(listed))
