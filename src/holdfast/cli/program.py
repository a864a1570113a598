"""All of `holdfast`'s commands, or the one that is wanted: what a command needs is loaded when it is asked for.

Groups and commands are declared in the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Final

import typer

from holdfast._version import __version__

#: Each command and group, in the order of the help, and the module that declares it: by a `register`, or, a group, as a
#: `Typer` of that name.
_HOMES: Final[Mapping[str, str]] = {
    "demo": "demo",
    "dev": "run",
    "worker": "run",
    "upkeep": "run",
    "serve": "serve",
    "submit": "submit",
    "explain": "explain",
    "reconcile": "reconcile",
    "jobs": "jobs",
    "queues": "queues",
    "workers": "workers",
    "dlq": "dlq",
    "suspended": "suspended",
    "approvals": "approvals",
    "effects": "effects",
    "outbox": "outbox",
    "trigger": "trigger_replay",
    "token": "access",
    "log": "access",
    "migrate": "migrate",
    "doctor": "doctor",
    "verify": "verify",
    "chaos": "chaos",
}


def program(wanted: str = "") -> typer.Typer:
    """The program with all of its commands, or with what is needed for this one."""
    app = typer.Typer(
        name="holdfast",
        help="Durable background tasks: every task reaches exactly one recorded outcome.\n\n"
        "An APP is module:app or file.py:app (the part after the colon can be left out if there is only one).",
        epilog="Exit codes: 0 done · 1 failed · 2 wrong call · 3 unavailable · 4 illegal move · 5 timeout · "
        "6 not allowed",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    homes = {wanted: _HOMES[wanted]} if wanted in _HOMES else _HOMES
    for home in dict.fromkeys(homes.values()):
        module = import_module(f"holdfast.cli.commands.{home}")
        if hasattr(module, "register"):
            module.register(app)
        else:
            name = next(name for name, place in homes.items() if place == home)
            app.add_typer(getattr(module, name), name=name)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"holdfast {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """See `help` above; options that all commands share stand with the commands."""
