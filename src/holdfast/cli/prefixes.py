"""Abbreviated ids: a full id, or a unique prefix of at least 12 characters.

A full id wins. A prefix is resolved in the ledger, among what the principal may see. Without a ledger there is no
index, and ids must be complete. Commands that take several ids require full ones: such lists come from programs.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, TypeVar

from holdfast.cli.event_view import iso
from holdfast.cli.output import emit_rows
from holdfast.errors import AmbiguousId, NotFound, UnknownJob

if TYPE_CHECKING:
    from holdfast.core.principal import Principal
    from holdfast.ledger.queries.jobs import Queries
    from holdfast.operations.operations import Operations


T = TypeVar("T")

#: These characters encode the millisecond of creation; shorter prefixes would match nearly everything.
SHORTEST: Final = 12
#: Length of an id that holdfast generates.
FULL_LENGTH: Final = 32
#: Maximum number of candidates that are printed.
_LISTED: Final = 10
#: Column header for the instant of a candidate.
_WHEN: Final = {"job": "created", "approval": "requested", "dead letter": "failed"}


async def with_whole_id(
    queries: Queries | None,
    noun: str,
    principal: Principal,
    text: str,
    act: Callable[[str], Awaitable[T]],
    *,
    queue: str | None = None,
    tenant: str | None = None,
) -> T:
    """Call `act` with this id or, if it does not exist, with the only id that starts with it.

    `act` must raise `UnknownJob` or `NotFound` for an id that does not exist, without changing anything. Raises the
    same errors, or `AmbiguousId` after printing the candidates on stderr.
    """
    try:
        return await act(text)
    except (UnknownJob, NotFound):
        found, advice = None, ""
        if queries is None:
            advice = "without a ledger a prefix cannot be resolved; pass the full id" if len(text) < FULL_LENGTH else ""
        elif len(text) < SHORTEST:
            advice = f"an id prefix needs at least {SHORTEST} characters"
        else:
            found = await _only(queries, noun, principal, text, queue, tenant)
        if found is None:
            raise (UnknownJob(text, advice) if noun == "job" else NotFound(noun, text, advice)) from None
    return await act(found)


async def whole_job_ids(
    operations: Operations, principal: Principal, ids: list[str], queue: str | None = None
) -> list[str]:
    """Return full job ids; a single id may be a prefix."""
    if len(ids) != 1:
        return ids
    view = await with_whole_id(
        queries_of(operations),
        "job",
        principal,
        ids[0],
        lambda job_id: operations.jobs.find(principal, job_id, queue),
        queue=queue,
    )
    return [view.job_id]


async def whole_dead_letter_ids(operations: Operations, principal: Principal, ids: list[str]) -> list[str]:
    """Return full dead letter ids; a single id may be a prefix."""
    if len(ids) != 1:
        return ids
    dead_letters = operations.dead_letters
    dead_letter = await with_whole_id(
        queries_of(operations), "dead letter", principal, ids[0], lambda dlq_id: dead_letters.show(principal, dlq_id)
    )
    return [dead_letter.dlq_id]


def queries_of(operations: Operations) -> Queries | None:
    """Return the ledger's queries; None without a ledger."""
    return None if operations.ledger is None else operations.ledger.queries


async def _only(
    queries: Queries, noun: str, principal: Principal, prefix: str, queue: str | None, tenant: str | None
) -> str | None:
    """Return the only id with this prefix; None if there is none. Raises `AmbiguousId`."""
    tenants = principal.visible_tenants
    if tenant is not None:
        tenants = (tenant,) if principal.can_see(tenant) else ()
    found = await queries.find_by_prefix(noun, prefix, tenants, queue, _LISTED + 1)
    if len(found) <= 1:
        return found[0].id if found else None
    shown = found[:_LISTED]
    rows = [(row.id, row.task, row.state, iso(row.at) or "") for row in shown]
    emit_rows((noun, "task", "state", _WHEN[noun]), rows, empty="", texts=0, out=sys.stderr)
    raise AmbiguousId(noun, prefix, len(shown), more=len(found) > len(shown))
