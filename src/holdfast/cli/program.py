"""All of `holdfast`'s commands. Groups and commands are declared in the modules beside this one."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast._version import __version__
from holdfast.cli import chaos, doctor, explain, log, reconcile, run, serve, submit, verify
from holdfast.cli.approvals import approvals
from holdfast.cli.deciding import dlq
from holdfast.cli.effects import effects
from holdfast.cli.jobs import jobs
from holdfast.cli.migrate import migrate
from holdfast.cli.outbox import outbox
from holdfast.cli.queues import queues
from holdfast.cli.suspended import suspended
from holdfast.cli.tokens import token
from holdfast.cli.triggers import trigger

app = typer.Typer(
    name="holdfast",
    help="Durable background tasks: every task reaches exactly one recorded outcome.\n\n"
    "An APP is module:app or file.py:app (the part after the colon can be left out if there is only one).",
    epilog="Exit codes: 0 done · 1 failed · 2 wrong call · 3 unavailable · 4 illegal move · 5 timeout · 6 not allowed",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

run.register(app)
serve.register(app)
submit.register(app)
explain.register(app)
reconcile.register(app)
app.add_typer(jobs, name="jobs")
app.add_typer(queues, name="queues")
app.add_typer(dlq, name="dlq")
app.add_typer(suspended, name="suspended")
app.add_typer(approvals, name="approvals")
app.add_typer(effects, name="effects")
app.add_typer(outbox, name="outbox")
app.add_typer(trigger, name="trigger")
app.add_typer(token, name="token")
log.register(app)
app.add_typer(migrate, name="migrate")
doctor.register(app)
verify.register(app)
chaos.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """See `help` above; options that all commands share stand with the commands."""
