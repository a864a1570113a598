"""Runs in a clean environment: every command's --help, then each page's code in a folder of its own.

    python smoke.py PAGE…

A page is a file of Python code. Prints the commands, one a line.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import typer.main

from holdfast.cli.program import program


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command and group."""
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def main() -> None:
    root: Any = typer.main.get_command(program())
    for path in commands(root):
        shown = io.StringIO()
        with redirect_stdout(shown):
            root.main([*path, "--help"], prog_name="holdfast", standalone_mode=False)
        if "Usage: " not in shown.getvalue():
            sys.exit(f"holdfast {' '.join(path)} --help shows no usage: {shown.getvalue()!r}")
        print("holdfast", *path)
    for page in [Path(page).resolve() for page in sys.argv[1:]]:
        os.chdir(page.parent)
        with (page.parent / "printed.txt").open("w") as printed, redirect_stdout(printed):
            runpy.run_path(str(page), run_name="__main__")


if __name__ == "__main__":
    main()
