"""Runs in a clean environment: every command's --help, calls of the program, a worker with a job, code of pages.

    python inside.py PLAN.json

The plan is a `Plan`; prints a `Report`. Calls are forked from this process, which has loaded the modules of all
commands: separate processes would spend half a minute on imports.
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
    """A call of the program in a folder, with its own variables."""

    words: list[str]
    folder: str
    variables: dict[str, str] = {}


class Plan(msgspec.Struct):
    """Work items, in order."""

    modules: list[str] = []
    calls: list[Call] = []
    #: A folder with an app, `shop.py`: a worker runs there until a job of its task `add` has ended.
    worker: str = ""
    #: Files of Python code; the output of each is written to `printed.txt` in its folder.
    pages: list[str] = []


class Result(msgspec.Struct):
    """The result of a call."""

    code: int
    out: str
    errors: str


class Report(msgspec.Struct):
    """The result of a plan."""

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
    """Fork the call. Return a function that sends it a signal (0: none) and waits for its end."""
    folder = Path(tempfile.mkdtemp(dir=call.folder))
    pid = os.fork()
    if pid == 0:
        for name, number in (("out", 1), ("errors", 2)):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
        os.chdir(call.folder)
        os.environ.update(call.variables)
        sys.argv = ["holdfast", *call.words]
        sys.path[0] = call.folder
        # As in a program: exits with its exit code, or with a traceback and 1 after an exception.
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
    report.submit = start(Call(["submit", "--force", "add", '{"a": 40, "b": 2}', "--wait", "250"], folder, variables))(
        0
    )
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
