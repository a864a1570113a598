"""`holdfast submit`: one job by the name of its task, from a shell."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import typer

from holdfast.app import Holdfast
from holdfast.cli.command import AsJson, command
from holdfast.cli.output import emit_json, note
from holdfast.cli.parse import PriorityName, duration, parse_instant, payload
from holdfast.cli.session import EngineTarget
from holdfast.client.options import SubmitOptions
from holdfast.client.submitter import BatchingSubmitter


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(
        app,
        "submit",
        examples=(
            """holdfast submit send_mail '{"to": "ada@example.org", "copies": 2}'""",
            "holdfast submit send_mail --arg to=ada@example.org --arg copies=2 --app mail.py:app",
            "holdfast submit send_mail --key order-17 --delay 5m --priority low --arg to=ada@example.org",
            "holdfast submit report --run-at 2030-01-31T08:00:00Z - < arguments.json",
            "holdfast submit add '[1, 2]' --wait 30 --json | jq .result",
        ),
    )(submit)


async def submit(
    at: EngineTarget,
    task: Annotated[str, typer.Argument(metavar="TASK", help="The task's name.")],
    arguments: Annotated[
        str | None,
        typer.Argument(
            metavar="JSON",
            help="Its arguments: a JSON object (by name) or array (by position); - reads stdin.",
            show_default=False,
        ),
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            "-a",
            metavar="NAME=VALUE",
            help="One argument; may be repeated. The value is JSON if it can be read so, else text.",
            show_default=False,
        ),
    ] = None,
    app: Annotated[
        str | None,
        typer.Option(
            metavar="APP",
            help="The app that has the task: checks name and arguments before anything is sent.",
            show_default=False,
        ),
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option("--queue", "-q", help="Default: the task's own with --app, else 'default'.", show_default=False),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Idempotency key: a second job with it is not made.", show_default=False)
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Run no earlier than this from now: 90, 5m, 1h30m.", show_default=False),
    ] = None,
    run_at: Annotated[
        str | None,
        typer.Option(metavar="INSTANT", help="Run no earlier than this: 2030-01-31T08:00:00Z.", show_default=False),
    ] = None,
    priority: Annotated[PriorityName | None, typer.Option(help="Which line it waits in.", show_default=False)] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose job it is.", show_default=False)] = None,
    durable: Annotated[
        bool, typer.Option("--durable", help="Return only once the ledger has the job; a wipe cannot lose it then.")
    ] = False,
    wait: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Wait for the result and print it; exit code 1 if the job fails, 5 if it takes longer.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Submit one job and print its id; with --wait print its result."""
    encoded = payload(arguments, arg or [])
    options: SubmitOptions = {
        "queue": queue,
        "idempotency_key": key,
        "delay": None if delay is None else duration(delay, "--delay"),
        "run_at": None if run_at is None else parse_instant(run_at, "--run-at"),
        "priority": None if priority is None else priority.value,
        "tenant_id": tenant,
        "durable": durable,
    }
    async with at.app(app) if app else Holdfast(settings=at.settings()) as holdfast:
        desk = await holdfast.submitter()
        if durable and isinstance(desk, BatchingSubmitter):
            # Now, in case the person does not wait for the ledger.
            desk.on_accepted = lambda receipt: note(f"accepted {receipt.job_id}, waiting for the ledger")
        job = await holdfast.submit_raw(task, encoded, **options)
        receipt: dict[str, Any] = {"job_id": job.id, "queue": job.queue, "duplicate": job.duplicate}
        if wait is not None:
            note(f"submitted {job.id}, waiting up to {wait:g} s")
            receipt |= {"result": await job.result(timeout=timedelta(seconds=wait))}
    _print(receipt, as_json=as_json)


def _print(receipt: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        emit_json(receipt)
    elif "result" in receipt:
        emit_json(receipt["result"])
    else:
        print(receipt["job_id"])
    if receipt["duplicate"]:
        note("this key was known: no new job was made")
