"""How a command is declared: once here are the options that all of them share, and what becomes of errors.

A command is a plain function whose first parameter is the `Connection`; `@command` adds `--url`,
`--namespace` and `--debug`, puts the examples into the help, and turns a `HoldfastError` into its line
and its exit code.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.markup import escape

from holdfast.app import Holdfast
from holdfast.cli.exits import report
from holdfast.cli.loading import load_app
from holdfast.cli.runner import run_async
from holdfast.clock import SystemClock
from holdfast.engine.factory import build_engine, sqlite_path
from holdfast.engine.port import Engine
from holdfast.errors import HoldfastError, InvalidOption, UsageError
from holdfast.extras import require_drivers
from holdfast.settings import Settings

_SHARED: Final = "Shared options"

Url = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Where the engine is: sqlite:///file.db or redis://host:port/0. Default: the URL that the APP was made "
        "with, HOLDFAST_URL, holdfast.toml, then sqlite:///holdfast.db.",
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
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.", rich_help_panel=_SHARED)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
OneQueue = Annotated[
    str | None,
    typer.Option(
        "--queue", "-q", metavar="NAME", help="The job's queue; without it all are asked.", show_default=False
    ),
]
Queues = Annotated[
    list[str] | None,
    typer.Option(
        "--queue", "-q", metavar="NAME", help="Only this queue; may be repeated. Default: all.", show_default=False
    ),
]


@dataclass(frozen=True, slots=True)
class Connection:
    """Which engine the person means."""

    url: str | None
    namespace: str | None

    def settings(self) -> Settings:
        """Settings with what was given here on top. Raises `MissingExtra` for a store whose driver is not installed."""
        settings = Settings.load(url=self.url, namespace=self.namespace)
        require_drivers(settings.url, settings.ledger)
        return settings

    def app(self, reference: str) -> Holdfast:
        """The user's app, on the engine that was named here, else on its own."""
        app = load_app(reference)
        given: dict[str, Any] = {"url": self.url, "namespace": self.namespace}
        given = {name: value for name, value in given.items() if value is not None}
        if given:
            app.configure(**given)
        return app

    def some_app(self, reference: str | None) -> Holdfast:
        """The user's app if it was named, else one without tasks on the same engine."""
        return Holdfast(settings=self.settings()) if reference is None else self.app(reference)

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Engine]:
        """The engine, open. A look at a database that is not there must not make one."""
        settings = self.settings()
        must_exist(settings.url)
        engine = build_engine(settings, SystemClock())
        await engine.open()
        try:
            yield engine
        finally:
            await engine.close()


def must_exist(url: str) -> None:
    """Raise `UsageError` for a SQLite database that nobody has made yet."""
    if url.startswith("sqlite:") and (path := sqlite_path(url)) != ":memory:" and not Path(path).exists():
        raise UsageError(
            f"there is no database {Path(path).absolute()}; nothing was submitted there yet, "
            "or --url (HOLDFAST_URL) should name another one"
        )


def ledger_must_exist(settings: Settings) -> None:
    """Raise `UsageError` for a ledger file that nobody has made yet."""
    url = settings.ledger or ""
    if url.startswith("sqlite:") and not Path(sqlite_path(url)).exists():
        raise UsageError(f"there is no ledger {Path(sqlite_path(url)).absolute()} yet; no worker has written to it")


def command(
    group: typer.Typer, name: str, *, examples: tuple[str, ...]
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Register an async function as a command. Its docstring is the help text."""

    def register(function: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        def run(url: str | None, namespace: str | None, debug: bool, **arguments: Any) -> None:
            try:
                _check_text(arguments)
                run_async(function(Connection(url, namespace), **arguments))
            except HoldfastError as exc:
                raise typer.Exit(report(exc, debug=debug)) from exc

        run.__doc__ = function.__doc__
        run.__name__ = function.__name__
        # Typer reads the parameters from here; `run` itself takes whatever they are.
        run.__signature__ = _signature(function)  # type: ignore[attr-defined]
        run.__annotations__ = {}
        return group.command(name, epilog=_epilog(examples))(run)

    return register


def _check_text(arguments: dict[str, Any]) -> None:
    """Raise `InvalidOption` for bytes that are not UTF-8: Python makes surrogates of them, which no store takes."""
    for name, value in arguments.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not text.isascii() and text != text.encode("utf-8", "ignore").decode():
                raise InvalidOption(f"{name} {text!r} is not UTF-8 text; check what passes it on")


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
