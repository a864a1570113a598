"""Options that choose among many: dead letters, suspended jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.parse import when
from holdfast.ledger.people import LetterStatus

if TYPE_CHECKING:
    from holdfast.ledger.letters import LetterFilter
    from holdfast.offices import Offices

LetterIds = Annotated[
    list[str] | None, typer.Argument(metavar="LETTER...", help="Ids of dead letters.", show_default=False)
]
LetterId = Annotated[str, typer.Argument(metavar="LETTER", help="The dead letter's id.")]
Task = Annotated[
    str | None, typer.Option("--task", "-t", metavar="TASK", help="Only of this task.", show_default=False)
]
OneOfQueues = Annotated[
    list[str] | None,
    typer.Option("--queue", "-q", metavar="NAME", help="Only of this queue; repeatable.", show_default=False),
]
Tenant = Annotated[
    str | None, typer.Option("--tenant", metavar="NAME", help="Only of this tenant.", show_default=False)
]
Code = Annotated[
    str | None, typer.Option("--code", metavar="CODE", help="Only with this error code.", show_default=False)
]
Fingerprint = Annotated[
    str | None,
    typer.Option(
        "--fingerprint", "-f", metavar="HEX", help="Only of this kind, as `dlq groups` shows it.", show_default=False
    ),
]
Since = Annotated[
    str | None,
    typer.Option(metavar="WHEN", help="Failed at this instant or later, or so long ago (1h, 2d).", show_default=False),
]
Until = Annotated[
    str | None,
    typer.Option(metavar="WHEN", help="Failed before this instant, or longer ago than this.", show_default=False),
]
Words = Annotated[
    str | None, typer.Option("--text", metavar="TEXT", help="Text in the error, in any case.", show_default=False)
]
Statuses = Annotated[
    list[LetterStatus] | None,
    typer.Option("--status", "-s", help="Only in this status; repeatable. Default: all.", show_default=False),
]
Reason = Annotated[str, typer.Option(help="Why; kept in the log.")]
MustReason = Annotated[str, typer.Option(help="Why; needed, and kept in the log.")]
AppName = Annotated[
    str | None,
    typer.Option(
        "--app",
        metavar="APP",
        help="The app that has the tasks: payloads are checked, and its guards see the new jobs at once.",
        show_default=False,
    ),
]


async def letter_filter(
    offices: Offices,
    task: str | None,
    queue: list[str] | None,
    tenant: str | None,
    code: str | None,
    fingerprint: str | None,
    since: str | None,
    until: str | None,
    text: str | None,
    status: list[LetterStatus] | None,
) -> LetterFilter:
    """What was given, as the ledger takes it."""
    from holdfast.ledger.letters import LetterFilter

    now_ms = await offices.engine.now_ms()
    return LetterFilter(
        job_type=task,
        queues=frozenset(queue or ()),
        tenants=None if tenant is None else (tenant,),
        error_code=code,
        fingerprint=fingerprint,
        since=None if since is None else when(since, "--since", now_ms),
        until=None if until is None else when(until, "--until", now_ms),
        text=text,
        statuses=frozenset(status or ()),
    )
