"""`holdfast queues`: list queues and change their controls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from holdfast.cli.command import AsJson, Queues, command
from holdfast.cli.output import emit_json, emit_line, emit_rows, on_terminal
from holdfast.cli.session import EngineTarget, open_operations, partial_result
from holdfast.core.states import FINAL, State
from holdfast.core.text import check_name
from holdfast.engine.port.operators import QueueControl, TenantControl
from holdfast.errors import InvalidOption, NotFound
from holdfast.operations.queues import QueueInfo

if TYPE_CHECKING:
    from holdfast.core.principal import Principal
    from holdfast.operations.operations import Operations


queues = typer.Typer(help="List, pause, resume and limit queues.", no_args_is_help=True)

_OPEN: Final = tuple(state for state in State if state not in FINAL)
#: Removes a limit.
_NONE: Final = "none"

Names = Annotated[list[str], typer.Argument(metavar="QUEUE...", help="Names of queues.")]
Name = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.")]
Limit = Annotated[str, typer.Argument(metavar="N", help="A number, or none to remove the limit.")]
Intake = Annotated[bool, typer.Option("--intake", help="Apply to new submissions instead of claims.")]
New = Annotated[bool, typer.Option("--new", help="Allow a queue that never had a job.")]
Reason = Annotated[str, typer.Option(help="Reason for the audit log.")]


@command(queues, "list", examples=("holdfast queues list", "holdfast queues list --json | jq '.[].states.queued'"))
async def list_queues(at: EngineTarget, queue: Queues = None, as_json: AsJson = False) -> None:
    """List queues: open jobs by state, workers, dead letters, controls."""
    async with open_operations(at) as (operations, principal):
        found, missing = await partial_result(operations.queues.find(principal, queue or ()))
    _show(found, as_json=as_json)
    if missing is not None:
        raise missing


def _show(found: Sequence[QueueInfo], *, as_json: bool) -> None:
    if as_json:
        emit_json([_document(view) for view in found])
        return
    # A terminal omits empty columns; a program relies on every column.
    states = [state for state in _OPEN if not on_terminal() or any(view.states.get(state) for view in found)]
    columns = ("queue", *(state.value for state in states), "delayed", "workers", "dead letters", "control")
    emit_rows(columns, [_row(view, states) for view in found], empty="no queues")


@command(
    queues,
    "pause",
    examples=("holdfast queues pause mail --reason 'the server moves'", "holdfast queues pause mail --intake"),
)
async def pause(
    at: EngineTarget,
    names: Names,
    intake: Intake = False,
    new: New = False,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Pause queues: workers claim no more jobs, running jobs continue. With --intake, refuse new jobs instead."""
    verb, change = ("pause_intake", {"intake_paused": True}) if intake else ("pause", {"paused": True})
    await _control(at, names, verb, reason, change, new=new, as_json=as_json)


@command(
    queues,
    "resume",
    examples=("holdfast queues resume mail", "holdfast queues resume mail --intake"),
)
async def resume(
    at: EngineTarget,
    names: Names,
    intake: Intake = False,
    new: New = False,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Resume queues: workers claim jobs again. With --intake, accept new jobs again."""
    verb, change = ("resume_intake", {"intake_paused": False}) if intake else ("unpause", {"paused": False})
    await _control(at, names, verb, reason, change, new=new, as_json=as_json)


@command(
    queues,
    "limit",
    examples=(
        "holdfast queues limit mail 10000 --reason 'the mail server is slow today'",
        "holdfast queues limit mail none",
    ),
)
async def limit(
    at: EngineTarget, name: Name, most: Limit, new: New = False, reason: Reason = "", as_json: AsJson = False
) -> None:
    """Refuse new jobs while N jobs are ready or running."""
    await _control(at, [name], "limit", reason, {"intake_limit": _number(most, "N")}, new=new, as_json=as_json)


@command(
    queues,
    "concurrency",
    examples=(
        "holdfast queues concurrency mail 5 --reason 'the mail server accepts 5 connections'",
        "holdfast queues concurrency mail none",
    ),
)
async def concurrency(
    at: EngineTarget, name: Name, most: Limit, new: New = False, reason: Reason = "", as_json: AsJson = False
) -> None:
    """Run at most N jobs of the queue at a time, over all workers and tenants. `worker-concurrency` is per process.

    The limit is never exceeded: jobs of a worker that was killed count until another worker has reclaimed them. If more
    jobs than N are running, no job starts until enough of them have ended.
    """
    await _control(at, [name], "concurrency", reason, {"concurrency": _number(most, "N")}, new=new, as_json=as_json)


@command(
    queues,
    "worker-concurrency",
    examples=("holdfast queues worker-concurrency mail 50", "holdfast queues worker-concurrency mail none"),
)
async def worker_concurrency(
    at: EngineTarget, name: Name, most: Limit, new: New = False, reason: Reason = "", as_json: AsJson = False
) -> None:
    """Run N jobs at a time in each worker process of the queue. `concurrency` is over all workers.

    Workers follow within seconds. A worker of several queues runs the lowest number that is set for one of them. none
    uses the worker's own --concurrency.
    """
    changes = {"worker_concurrency": _number(most, "N")}
    await _control(at, [name], "worker_concurrency", reason, changes, new=new, as_json=as_json)


@command(
    queues,
    "alert",
    examples=("holdfast queues alert mail 5000", "holdfast queues alert mail none"),
)
async def alert(
    at: EngineTarget, name: Name, most: Limit, new: New = False, reason: Reason = "", as_json: AsJson = False
) -> None:
    """Raise an alert at N ready or running jobs; none uses the setting."""
    await _control(at, [name], "alert", reason, {"backlog_alert": _number(most, "N")}, new=new, as_json=as_json)


@command(
    queues,
    "tenant",
    examples=(
        "holdfast queues tenant mail acme --weight 3 --reason 'pays for it'",
        "holdfast queues tenant mail globex --concurrency 2 --limit 1000",
        "holdfast queues tenant mail globex --weight 1 --concurrency none --limit none",
    ),
)
async def tenant(
    at: EngineTarget,
    name: Name,
    tenant_id: Annotated[str, typer.Argument(metavar="TENANT", help="Name of the tenant.")],
    weight: Annotated[
        int | None,
        typer.Option(min=1, help="Its fair share relative to other tenants; 1 is the default.", show_default=False),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(metavar="N", help="Limit of its running jobs over all workers, or none.", show_default=False),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(metavar="N", help="Refuse its new jobs while it has N, or none.", show_default=False),
    ] = None,
    new: New = False,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Set a tenant's weight and limits in a queue. Options that are not given stay unchanged."""
    changes: dict[str, Any] = {
        **({} if weight is None else {"weight": weight}),
        **({} if concurrency is None else {"concurrency": _number(concurrency, "--concurrency")}),
        **({} if limit is None else {"intake_limit": _number(limit, "--limit")}),
    }
    if not changes:
        raise InvalidOption("nothing to change; pass --weight, --concurrency or --limit")
    check_name(name, "queue")
    check_name(tenant_id, "tenant")
    async with open_operations(at) as (operations, principal):
        await _require(operations, principal, [name], new=new)
        control = await operations.queues.update_tenant(principal, name, tenant_id, reason=reason, **changes)
    _print({name: control}, as_json=as_json)


async def _control(
    at: EngineTarget, names: list[str], verb: str, reason: str, change: dict[str, Any], *, new: bool, as_json: bool
) -> None:
    for name in names:
        check_name(name, "queue")
    async with open_operations(at) as (operations, principal):
        await _require(operations, principal, names, new=new)
        changed = {
            name: await operations.queues.update_control(principal, name, reason=reason, verb=verb, **change)
            for name in names
        }
    _print(changed, as_json=as_json)


async def _require(operations: Operations, principal: Principal, names: list[str], *, new: bool) -> None:
    """Check that all queues exist before any is changed. Raises `NotFound`."""
    for name in names:
        if not new:
            try:
                await operations.queues.require_queue(principal, name)
            except NotFound as exc:
                raise NotFound("queue", name[:200], f"{exc.advice}; pass --new for a queue without jobs") from exc


def _print(changed: dict[str, QueueControl], *, as_json: bool) -> None:
    if as_json:
        emit_json([{"queue": name} | _plain(control) for name, control in changed.items()])
        return
    for name, control in changed.items():
        emit_line(name, _words(control))


def _number(text: str, name: str) -> int | None:
    if text == _NONE:
        return None
    if not text.isascii() or not text.isdigit():
        raise InvalidOption(f"{name}={text!r} is not a number; use a number or {_NONE}")
    return int(text)


def _document(view: QueueInfo) -> dict[str, Any]:
    return {
        "queue": view.queue,
        "states": {state.value: view.states.get(state, 0) for state in _OPEN},
        "backlog": view.backlog,
        "delayed": view.delayed,
        "workers": view.workers,
        "dead_letters": view.dead_letters,
        "feed_entries": view.feed_entries,
        **_plain(view.control),
    }


def _row(view: QueueInfo, states: Sequence[State]) -> tuple[str, ...]:
    return (
        view.queue,
        *(str(view.states.get(state, 0)) for state in states),
        *("–" if value is None else str(value) for value in (view.delayed, view.workers, view.dead_letters)),
        _words(view.control, view.states.get(State.RUNNING, 0) if view.workers is not None else None),
    )


def _plain(control: QueueControl) -> dict[str, Any]:
    return {
        "paused": control.paused,
        "intake_paused": control.intake_paused,
        "concurrency": control.concurrency,
        "worker_concurrency": control.worker_concurrency,
        "intake_limit": control.intake_limit,
        "backlog_alert": control.backlog_alert,
        "tenants": {
            name: {"weight": part.weight, "concurrency": part.concurrency, "intake_limit": part.intake_limit}
            for name, part in control.tenants.items()
        },
    }


def _words(control: QueueControl, running: int | None = None) -> str:
    """The controls in words. `running` counts the jobs of all tenants; None: unknown."""
    words = [
        *(["paused"] if control.paused else []),
        *(["intake paused"] if control.intake_paused else []),
        *_limits(control.concurrency, control.intake_limit, running),
        *([f"worker concurrency {control.worker_concurrency}"] if control.worker_concurrency is not None else []),
        *([f"alert at {control.backlog_alert}"] if control.backlog_alert is not None else []),
        *(f"tenant {name}: {_part(part)}" for name, part in sorted(control.tenants.items())),
    ]
    return ", ".join(words) or "open"


def _part(part: TenantControl) -> str:
    return " ".join(
        [*([f"weight {part.weight}"] if part.weight != 1 else []), *_limits(part.concurrency, part.intake_limit)]
    )


def _limits(concurrency: int | None, intake_limit: int | None, running: int | None = None) -> list[str]:
    reached = " (reached)" if concurrency is not None and running is not None and running >= concurrency else ""
    return [
        *([f"concurrency {concurrency}{reached}"] if concurrency is not None else []),
        *([f"intake limit {intake_limit}"] if intake_limit is not None else []),
    ]
