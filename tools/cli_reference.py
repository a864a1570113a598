"""Generate the parts of `docs/reference/cli.md`: every command with its options, and the exit codes.

They are read from the program, so that the page is always current.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from holdfast.cli.command import ExitCode
from holdfast.cli.program import program


def exit_codes() -> str:
    """A table with one row per exit code."""
    rows = [f"| {code.value} | {code.meaning} |" for code in ExitCode]
    return "\n".join(["| code | meaning |", "|---|---|", *rows]) + "\n"


def commands() -> str:
    """One section per command."""
    root = typer.main.get_command(program())
    return "\n".join(section for path, command in walk(root, "holdfast") for section in _section(path, command)) + "\n"


def walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every leaf command, with its full name."""
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
    """The examples in a command's help."""
    lines = (command.epilog or "").replace("\\[", "[").split("\n\n")
    return [line.strip() for line in lines if line.strip().startswith("holdfast") or "| xargs" in line]


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    return ", ".join(parameter.opts)


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
