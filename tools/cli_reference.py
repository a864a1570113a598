"""The generated half of `docs/reference/cli.md`: every command with its options, and the exit codes.

Read from the program itself, so that the page cannot fall behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from holdfast.cli.command import ExitCode
from holdfast.cli.program import program


def exit_codes() -> str:
    """A row per exit code."""
    rows = [f"| {code.value} | {code.meaning} |" for code in ExitCode]
    return "\n".join(["| code | meaning |", "|---|---|", *rows]) + "\n"


def commands() -> str:
    """A section per command."""
    root = typer.main.get_command(program())
    return "\n".join(section for path, command in walk(root, "holdfast") for section in _section(path, command)) + "\n"


def walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command that does something, with the words that call it."""
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name, child in children.items():
        yield from walk(child, f"{path} {name}")


def _section(path: str, command: Any) -> Iterator[str]:
    yield f"### `{path}`\n"
    yield f"{(command.help or '').strip()}\n"
    yield "```sh"
    yield from examples(command)
    yield "```\n"
    yield "| argument or option | meaning |"
    yield "|---|---|"
    for parameter in command.params:
        if parameter.name not in ("help", "url", "namespace", "debug") and not parameter.hidden:
            yield f"| `{_names(parameter)}` | {_escape(parameter.help or '')} |"
    yield ""


def examples(command: Any) -> list[str]:
    """The examples of a command's help, as one types them."""
    lines = (command.epilog or "").replace("\\[", "[").split("\n\n")
    return [line.strip() for line in lines if line.strip().startswith("holdfast") or "| xargs" in line]


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    return ", ".join(parameter.opts)


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
