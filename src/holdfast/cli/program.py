"""Assembly of the `holdfast` program from the modules in `cli.commands`.

Given a command name, only that command's module is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from holdfast._version import __version__
from holdfast.cli.output import emit_line
from holdfast.observe.visible import visible

#: Commands and groups in the order of the help → module that declares them, by a function `register` or, for a group,
#: as a `Typer` of that name.
_MODULES: Final[Mapping[str, str]] = {
    "demo": "demo",
    "dev": "worker",
    "worker": "worker",
    "upkeep": "worker",
    "serve": "serve",
    "submit": "submit",
    "explain": "explain",
    "reconcile": "reconcile",
    "jobs": "jobs",
    "queues": "queues",
    "tasks": "tasks",
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


def program(only: str = "") -> typer.Typer:
    """Build the program with all commands, or with the module of one."""
    app = typer.Typer(
        name="holdfast",
        cls=_Program,
        help="Durable background tasks: every task reaches exactly one recorded outcome.\n\n"
        "An APP is module:app or file.py:app; :app may be omitted if the module holds exactly one.",
        epilog="Exit codes: 0 done · 1 failed · 2 invalid call · 3 unavailable · 4 illegal move · 5 timeout · "
        "6 not allowed",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    modules = {only: _MODULES[only]} if only in _MODULES else _MODULES
    for module_name in dict.fromkeys(modules.values()):
        module = import_module(f"holdfast.cli.commands.{module_name}")
        if hasattr(module, "register"):
            module.register(app)
        else:
            name = next(name for name, target in modules.items() if target == module_name)
            app.add_typer(getattr(module, name), name=name)
    return app


class _Program(TyperGroup):
    """The program as a group of commands. Usage errors show their values as text."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _visible_errors():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with _visible_errors():
            return super().invoke(ctx)


@contextmanager
def _visible_errors() -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        # A usage error; its class belongs to Typer's own copy of click.
        if (format_message := getattr(exc, "format_message", None)) is not None:
            text = visible(format_message())
            exc.format_message = lambda: text  # type: ignore[attr-defined]
        raise


def _print_version(requested: bool) -> None:
    if requested:
        emit_line(f"holdfast {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Root callback. The help text is in `program`; shared options are declared on each command."""
