"""The servers themselves: what `holdfast doctor` asks of them, and whether the ledger's user has its rights."""

from __future__ import annotations

from functools import partial
from typing import Final

from holdfast.acceptance.model import Criterion, NotApplicable, Unmet
from holdfast.acceptance.stage import Stage
from holdfast.engine.port import Finding


async def diagnosed(stage: Stage) -> list[Criterion]:
    """A criterion for each thing that `holdfast doctor` looks at here: on one server, on each master, in a file."""
    found = [("engine", finding) for finding in await stage.app.engine.diagnose([])]
    port = stage.app.ledger_port
    if port is not None and port.projection is not None:
        found += [("ledger", finding) for finding in await port.diagnose()]
    return [_criterion(part, finding) for part, finding in found]


def _criterion(part: str, finding: Finding) -> Criterion:
    check = "server" if finding.check == part else finding.check.removeprefix(f"{part} ")
    return Criterion(
        f"{part}.{check.replace(' ', '-')}",
        f"the {part}'s {check} endangers no job",
        "what `holdfast doctor` asks",
        partial(_judged, finding=finding),
    )


async def _judged(_stage: Stage, *, finding: Finding) -> str:
    said = f"{finding.message}; {finding.advice}" if finding.advice and not finding.ok else finding.message
    if finding.ok or finding.warning:
        return said if finding.ok else f"a warning, no danger: {said}"
    raise Unmet(said)


async def place(stage: Stage) -> str:
    if stage.room.no_ledger:
        raise Unmet(stage.room.no_ledger)
    return f"under the name {stage.room.name}"


async def tables(stage: Stage) -> str:
    if stage.room.postgres is None:
        raise NotApplicable("there is no ledger in PostgreSQL (HOLDFAST_LEDGER)")
    if wrong := await stage.room.postgres.wrong_with_tables():
        raise Unmet(wrong)
    return "of this release, and its user may read and write them"


CRITERIA: Final = (
    Criterion("place", "the check has a place of its own", "a namespace, and a schema or a file", place),
    Criterion("ledger.tables", "the ledger's tables and rights on them", "a look at the deployment's own", tables),
)
