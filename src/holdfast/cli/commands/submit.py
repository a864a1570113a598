"""`holdfast submit`: submit one job by the name of its task."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import typer

from holdfast.app import Holdfast
from holdfast.cli.command import AsJson, command
from holdfast.cli.output import emit_json, emit_line, note
from holdfast.cli.parse import PriorityName, duration, parse_instant, payload
from holdfast.cli.session import EngineTarget
from holdfast.client.job import Job
from holdfast.client.options import SubmitOptions
from holdfast.client.submitter import BatchingSubmitter
from holdfast.core.job import KeyReuse
from holdfast.execution.backend import backend_of


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
            "holdfast submit rebuild_index --queue batch --force",
        ),
    )(submit)


async def submit(
    at: EngineTarget,
    task: Annotated[str, typer.Argument(metavar="TASK", help="Name of the task.")],
    arguments: Annotated[
        str | None,
        typer.Argument(
            metavar="JSON",
            help="Arguments: a JSON object (by name) or array (by position); - reads stdin.",
            show_default=False,
        ),
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            "-a",
            metavar="NAME=VALUE",
            help="One argument; repeatable. The value is parsed as JSON if possible, else taken as text.",
            show_default=False,
        ),
    ] = None,
    app: Annotated[
        str | None,
        typer.Option(
            metavar="APP",
            help="App with the task. Default: name and arguments are checked against what workers have announced.",
            show_default=False,
        ),
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option("--queue", "-q", help="Queue. Default: the task's own queue.", show_default=False),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Idempotency key: submitting it again returns the same job.", show_default=False)
    ] = None,
    on_key_reuse: Annotated[
        KeyReuse,
        typer.Option(
            help="If the key belongs to another task or to other arguments: fail, or print the first job's id."
        ),
    ] = KeyReuse.REFUSE,
    delay: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Delay before the first run: 90, 5m, 1h30m.", show_default=False),
    ] = None,
    run_at: Annotated[
        str | None,
        typer.Option(metavar="INSTANT", help="Earliest start: 2030-01-31T08:00:00Z.", show_default=False),
    ] = None,
    priority: Annotated[PriorityName | None, typer.Option(help="Priority.", show_default=False)] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant.", show_default=False)] = None,
    durable: Annotated[
        bool,
        typer.Option(
            "--durable", help="Return only once the ledger has the job, so that a wipe of the engine cannot lose it."
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Without an app: submit even if no worker has announced the task or its arguments do not fit.",
        ),
    ] = False,
    wait: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Wait for the result and print it; exit code 1 if the job fails, 5 on timeout.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Submit one job and print its id, or with --wait its result."""
    encoded = payload(arguments, arg or [])
    options: SubmitOptions = {
        "queue": queue,
        "idempotency_key": key,
        "on_key_reuse": on_key_reuse,
        "delay": None if delay is None else duration(delay, "--delay"),
        "run_at": None if run_at is None else parse_instant(run_at, "--run-at"),
        "priority": None if priority is None else priority.value,
        "tenant_id": tenant,
        "durable": durable,
    }
    async with at.app(app) if app else Holdfast(settings=at.settings()) as holdfast:
        backend = backend_of(holdfast)
        submitter = await backend.connections.submitter()
        if durable and isinstance(submitter, BatchingSubmitter):
            # Printed before the ledger confirms, in case the user interrupts.
            submitter.on_accepted = lambda receipt: note(f"accepted {receipt.job_id}, waiting for the ledger")
        announced = None if app else await backend.announced.require(task, encoded, force=force)
        envelope = backend.envelope(task, encoded, announced, **options)
        accepted = await submitter.submit(envelope)
        job: Job[Any] = Job(backend, accepted.job_id, envelope.queue, accepted.duplicate)
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
        emit_line(receipt["job_id"])
    if receipt["duplicate"]:
        note("duplicate idempotency key: no new job was created")
