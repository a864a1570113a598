"""Runs in a clean environment: every command's --help, calls of the program, a worker with a job, code of pages.

    python inside.py PLAN.json

The plan is a `Plan`; prints a `Report`. Calls are forked from this process, which has loaded what all commands load: a
process of its own for each would take half a minute of imports.
"""

from __future__ import annotations

import io
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import typer.main

from holdfast.cli.main import main as holdfast
from holdfast.cli.program import program


class Call(msgspec.Struct):
    """A call of the program in a folder, with variables of its own."""

    words: list[str]
    folder: str
    variables: dict[str, str] = {}


class Plan(msgspec.Struct):
    """What to do, in this order."""

    modules: list[str] = []
    calls: list[Call] = []
    #: A folder with an app, `shop.py`: a worker runs there until a job of its task `add` has ended.
    worker: str = ""
    #: Files of Python code; what one prints is written to `printed.txt` beside it.
    pages: list[str] = []


class Result(msgspec.Struct):
    """What became of a call."""

    code: int
    out: str
    errors: str


class Report(msgspec.Struct):
    """What became of the plan."""

    #: Words of every command and group whose help was shown.
    commands: list[list[str]]
    calls: list[Result]
    submit: Result | None = None
    worker: Result | None = None


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command and group."""
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def show_help(root: Any, path: tuple[str, ...]) -> None:
    shown = io.StringIO()
    with redirect_stdout(shown):
        root.main([*path, "--help"], prog_name="holdfast", standalone_mode=False)
    if "Usage: " not in shown.getvalue():
        sys.exit(f"holdfast {' '.join(path)} --help shows no usage: {shown.getvalue()!r}")


def start(call: Call) -> Callable[[int], Result]:
    """Fork it. What is returned sends it a signal, unless that is 0, and waits for its end."""
    folder = Path(tempfile.mkdtemp(dir=call.folder))
    pid = os.fork()
    if pid == 0:
        for name, number in (("out", 1), ("errors", 2)):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
        os.chdir(call.folder)
        os.environ.update(call.variables)
        sys.argv = ["holdfast", *call.words]
        sys.path[0] = call.folder
        # As at the top of a program: leaves with its exit code, and an exception with a traceback and 1.
        holdfast()
        sys.exit(0)

    def end(number: int) -> Result:
        os.kill(pid, number)
        _, status = os.waitpid(pid, 0)
        return Result(os.waitstatus_to_exitcode(status), (folder / "out").read_text(), (folder / "errors").read_text())

    return end


def work(folder: str, report: Report) -> None:
    variables = {"HOLDFAST_URL": "sqlite:///worker.db"}
    worker = start(Call(["worker", "shop.py:app"], folder, variables))
    report.submit = start(Call(["submit", "add", '{"a": 40, "b": 2}', "--wait", "250"], folder, variables))(0)
    report.worker = worker(signal.SIGTERM)


def run(plan: Plan) -> Report:
    for module in plan.modules:
        import_module(module)
    root: Any = typer.main.get_command(program())
    report = Report([], [start(call)(0) for call in plan.calls])
    if plan.worker:
        work(plan.worker, report)
    for path in commands(root):
        show_help(root, path)
        report.commands.append(list(path))
    for page in map(Path, plan.pages):
        os.chdir(page.parent)
        with (page.parent / "printed.txt").open("w") as printed, redirect_stdout(printed):
            runpy.run_path(str(page), run_name="__main__")
    return report


if __name__ == "__main__":
    print(msgspec.json.encode(run(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan))).decode())
