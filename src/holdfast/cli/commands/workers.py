"""`holdfast workers`: list the processes that claim jobs. `holdfast worker` is in `commands.worker`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import typer

from holdfast.cli.command import AsJson, Queues, command
from holdfast.cli.output import emit_json, emit_rows, span
from holdfast.cli.session import EngineTarget, open_operations
from holdfast.clock import iso
from holdfast.engine.port.reads import WorkerInfo
from holdfast.identity import Identity, parse_identity

_COLUMNS: Final = ("worker", "host", "pid", "in flight", "running for", "last seen", "queues")


@dataclass(slots=True)
class _WorkerInfo:
    """One worker in all of its queues."""

    worker: str
    identity: Identity | None
    queues: list[str] = field(default_factory=list)
    in_flight: int = 0
    seen_at_ms: int = 0


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(
        app,
        "workers",
        examples=(
            "holdfast workers",
            "holdfast workers --queue mail",
            "holdfast workers --json | jq -r '.[] | select(.in_flight > 0) | .worker'",
        ),
    )(workers)


async def workers(at: EngineTarget, queue: Queues = None, as_json: AsJson = False) -> None:
    """List workers, as the engine last saw them.

    A worker that was killed is listed until its leases have expired and upkeep has removed it.
    """
    async with open_operations(at) as (operations, principal):
        views = await operations.queues.workers(principal, queue or ())
        now_ms = await operations.engine.now_ms()
    found = _group_by_worker(views)
    if as_json:
        emit_json([_document(info) for info in found])
    else:
        emit_rows(_COLUMNS, [_row(info, now_ms) for info in found], empty="no worker claims jobs here")


def _group_by_worker(views: Iterable[WorkerInfo]) -> Sequence[_WorkerInfo]:
    found: dict[str, _WorkerInfo] = {}
    for view in views:
        info = found.setdefault(view.worker, _WorkerInfo(view.worker, parse_identity(view.worker)))
        info.queues.append(view.queue)
        info.in_flight += view.pending
        info.seen_at_ms = max(info.seen_at_ms, view.seen_at_ms)
    return [found[worker] for worker in sorted(found)]


def _row(info: _WorkerInfo, now_ms: int) -> tuple[str, ...]:
    identity = info.identity
    return (
        info.worker,
        "" if identity is None else identity.host,
        "" if identity is None else str(identity.pid),
        str(info.in_flight),
        "" if identity is None else span(max(0, now_ms - identity.started_at_ms)),
        f"{span(max(0, now_ms - info.seen_at_ms))} ago",
        ", ".join(sorted(info.queues)),
    )


def _document(info: _WorkerInfo) -> dict[str, Any]:
    identity = info.identity
    return {
        "worker": info.worker,
        "name": (identity.name or None) if identity is not None else None,
        "host": None if identity is None else identity.host,
        "pid": None if identity is None else identity.pid,
        "queues": sorted(info.queues),
        "in_flight": info.in_flight,
        "started_at": None if identity is None else iso(identity.started_at_ms),
        "seen_at": iso(info.seen_at_ms),
    }
