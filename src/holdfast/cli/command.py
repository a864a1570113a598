"""Declaration of commands: `@command`, shared options, error output and exit codes.

A command is an async function whose first parameter is the `EngineTarget`. `@command` adds `--url`, `--namespace` and
`--debug`, puts the examples into the help, and turns a `HoldfastError` into one line on stderr and an exit code.

Scripts may rely on the codes of `ExitCode`: 3 and 5 are worth a retry; 2, 4 and 6 are not.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Coroutine
from enum import IntEnum
from typing import Annotated, Any, Final

import typer
from rich.markup import escape

from holdfast.cli.lifecycle import run_async
from holdfast.cli.output import note, print_traceback
from holdfast.cli.session import EngineTarget
from holdfast.errors import (
    Conflict,
    Denied,
    Forbidden,
    HoldfastError,
    IntakeRefused,
    InvalidOption,
    LedgerRefused,
    NotDurableYet,
    NotFound,
    SchemaMismatch,
    TransitionInvalid,
    Unauthorized,
    Unavailable,
    UsageError,
    WaitTimeout,
)
from holdfast.observe.log_formats import format_unhandled_logs
from holdfast.observe.redact import redact


class ExitCode(IntEnum):
    """Exit codes of all commands."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        code = int.__new__(cls, value)
        code._value_ = value
        code.meaning = meaning
        return code

    OK = 0, "done"
    FAILED = 1, "the command failed: the job did not succeed, or `doctor` found a problem"
    USAGE = (
        2,
        "unknown option, app, task, job or id, invalid arguments or settings, ledger of another release, id in use",
    )
    UNAVAILABLE = 3, "the engine or a broker is unreachable, or the queue accepts no new jobs; safe to retry"
    ILLEGAL = 4, "illegal move (`WF_STATE_TRANSITION_INVALID`), or already decided (`CONFLICT`); nothing was changed"
    TIMEOUT = 5, "not finished within the timeout; the job continues"
    REFUSED = 6, "not allowed: no valid token, insufficient role, a second principal is required, or a guard denied it"


def exit_code(error: HoldfastError) -> ExitCode:
    """Map an error to its exit code."""
    match error:
        case UsageError() | SchemaMismatch() | NotFound() | LedgerRefused():
            return ExitCode.USAGE
        case Unavailable() | IntakeRefused():
            return ExitCode.UNAVAILABLE
        case TransitionInvalid() | Conflict():
            return ExitCode.ILLEGAL
        case WaitTimeout() | NotDurableYet():
            return ExitCode.TIMEOUT
        case Unauthorized() | Forbidden() | Denied():
            return ExitCode.REFUSED
        case _:
            return ExitCode.FAILED


def print_error(error: HoldfastError, *, debug: bool) -> ExitCode:
    """Print an error as one line on stderr, with `debug` after its traceback. Returns the exit code."""
    if debug:
        print_traceback(error)
    note(f"holdfast: {error.code}: {error}")
    return exit_code(error)


_SHARED: Final = "Shared options"

Url = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Engine: sqlite:///file.db or redis://host:port/0. Default: the URL set in the APP's code, "
        "HOLDFAST_URL, holdfast.toml, then sqlite:///holdfast.db.",
        rich_help_panel=_SHARED,
        show_default=False,
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Prefix of all names in the store. Default: HOLDFAST_NAMESPACE.",
        rich_help_panel=_SHARED,
        show_default=False,
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors.", rich_help_panel=_SHARED)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
OneQueue = Annotated[
    str | None,
    typer.Option(
        "--queue", "-q", metavar="NAME", help="Queue of the job. Default: search all queues.", show_default=False
    ),
]
Queues = Annotated[
    list[str] | None,
    typer.Option(
        "--queue", "-q", metavar="NAME", help="Only this queue; repeatable. Default: all.", show_default=False
    ),
]


def command(
    group: typer.Typer, name: str, *, examples: tuple[str, ...]
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Register an async function as a command; its docstring is the help text."""

    def register(function: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        def run(url: str | None, namespace: str | None, debug: bool, **arguments: Any) -> None:
            format_unhandled_logs()
            try:
                _check_text(arguments)
                _warn_about_passwords(url=url, ledger=arguments.get("ledger"))
                run_async(function(EngineTarget(url, namespace), **arguments))
            except HoldfastError as exc:
                raise typer.Exit(print_error(exc, debug=debug)) from exc

        run.__doc__ = function.__doc__
        run.__name__ = function.__name__
        # Typer reads the parameters from here; `run` itself accepts any.
        run.__signature__ = _signature(function)  # type: ignore[attr-defined]
        run.__annotations__ = {}
        return group.command(name, epilog=_epilog(examples))(run)

    return register


def _check_text(arguments: dict[str, Any]) -> None:
    """Raise `InvalidOption` for bytes that are not UTF-8.

    Python decodes them to surrogates, which no store accepts.
    """
    for name, value in arguments.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not text.isascii() and text != text.encode("utf-8", "ignore").decode():
                raise InvalidOption(f"{name} {text!r} is not UTF-8 text; check the encoding of the calling program")


def _warn_about_passwords(**urls: object) -> None:
    """Warn about a password in an argument, which every user of the machine can read."""
    for name, url in urls.items():
        if isinstance(url, str) and redact(url) != url:
            note(
                f"the password in --{name} is visible in the process list; set HOLDFAST_{name.upper()}, "
                f"or name a file with it in HOLDFAST_{name.upper()}_FILE"
            )


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    hints = typing.get_type_hints(function, include_extras=True)
    own = list(inspect.signature(function).parameters.values())[1:]
    shared = {"url": (Url, None), "namespace": (Namespace, None), "debug": (Debug, False)}
    parameters = [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own
    ]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in shared.items()
    ]
    return inspect.Signature(parameters)


def _epilog(examples: tuple[str, ...]) -> str:
    return "\n\n".join(["[bold]Examples[/bold]", *(f"  {escape(example)}" for example in examples)])
