"""Take out one safety check at a time and see whether the contract suite notices.

`tools/mutants.toml` lists the mutants: for each engine, exact texts to replace. Each is applied to a copy
of `src` in a temporary folder, and the engine's contract tests run against that copy. A mutant is *killed*
when a test fails while the smoke test still passes: a copy that cannot run at all would prove nothing.
Exit 0 only if every mutant was killed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

ROOT: Final = Path(__file__).resolve().parent.parent
LIST: Final = ROOT / "tools" / "mutants.toml"
#: One engine's contract tests take well under a minute; a mutant may hang until each test's own timeout.
RUN_TIMEOUT_S: Final = 600

_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Patch:
    """One exact text in one file, and what to put in its place."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """One safety check of one engine, taken out."""

    check: str
    engine: str
    patches: tuple[Patch, ...]


@dataclass(frozen=True, slots=True)
class Suite:
    """What to run: per engine, pytest arguments for the whole suite and for the smoke test."""

    tests: dict[str, list[str]]
    smoke: dict[str, list[str]]


class Broken(Exception):
    """The tool itself cannot go on: a patch does not fit, or the suite is red without any mutant."""


def load() -> tuple[Suite, list[Mutant]]:
    data = tomllib.loads(LIST.read_text(encoding="utf-8"))
    mutants = [
        Mutant(entry["check"], entry["engine"], tuple(Patch(**patch) for patch in entry["patch"]))
        for entry in data["mutant"]
    ]
    return Suite(data["tests"], data["smoke"]), mutants


def apply(mutant: Mutant, source: Path) -> None:
    """Change the copy; every text must be there exactly once."""
    for patch in mutant.patches:
        path = source / patch.file
        text = path.read_text(encoding="utf-8")
        if text.count(patch.old) != 1:
            raise Broken(
                f"{mutant.check} on {mutant.engine}: found {text.count(patch.old)} times in {patch.file}, "
                f"must be there once; bring tools/mutants.toml up to date:\n{patch.old}"
            )
        path.write_text(text.replace(patch.old, patch.new), encoding="utf-8")


def run(source: Path, arguments: Sequence[str]) -> tuple[bool, str]:
    """Whether pytest is green on this copy, and the first test that is not."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=RUN_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return False, "(ran out of time)"
    if done.returncode == 0:
        return True, ""
    if done.returncode != 1:
        raise Broken(f"pytest itself failed ({done.returncode}):\n{done.stdout}{done.stderr}")
    first = _FAILED.search(done.stdout)
    return False, first[1] if first else "(unnamed)"


def judge(mutant: Mutant, suite: Suite, source: Path) -> tuple[bool, str]:
    """Whether the mutant was killed, and by which test."""
    apply(mutant, source)
    green, test = run(source, suite.tests[mutant.engine])
    if green:
        return False, ""
    alive, smoke = run(source, suite.smoke[mutant.engine])
    if not alive:
        raise Broken(f"{mutant.check} on {mutant.engine} breaks even the smoke test {smoke}: it proves nothing")
    return True, test


def check_baseline(engine: str, suite: Suite, source: Path) -> None:
    """Without any mutant everything must be green, and it must be the copy that runs."""
    where = subprocess.run(
        [sys.executable, "-c", "import holdfast.errors; print(holdfast.errors.__file__)"],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=True,
    )
    if not where.stdout.startswith(str(source)):
        raise Broken(f"the copy is not what runs: {where.stdout}")
    green, test = run(source, suite.tests[engine])
    if not green:
        raise Broken(f"the suite of {engine} is red without any mutant: {test}")


def copied(place: Path, name: str) -> Path:
    """A fresh copy of `src`."""
    return Path(shutil.copytree(ROOT / "src", place / name, ignore=shutil.ignore_patterns("__pycache__")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engine", action="append", help="only this engine (can be repeated)")
    parser.add_argument("--check", default="", help="only mutants whose check contains this text")
    wanted = parser.parse_args()
    console = Console(width=140)
    suite, mutants = load()
    chosen = [
        mutant
        for mutant in mutants
        if wanted.check in mutant.check and (not wanted.engine or mutant.engine in wanted.engine)
    ]
    survivors = 0
    table = Table("check taken out", "engine", "verdict", "first failing test", title="mutants")
    with tempfile.TemporaryDirectory(prefix="holdfast-mutants-") as folder:
        place = Path(folder)
        try:
            for engine in sorted({mutant.engine for mutant in chosen}):
                console.print(f"{engine}: without any mutant …")
                check_baseline(engine, suite, copied(place, f"baseline-{engine}"))
            for number, mutant in enumerate(chosen):
                killed, test = judge(mutant, suite, copied(place, f"mutant-{number}"))
                survivors += not killed
                verdict = "killed" if killed else "SURVIVED"
                console.print(f"{mutant.engine}: {mutant.check}: {verdict}", markup=False)
                table.add_row(mutant.check, mutant.engine, verdict, test.partition("::")[2] or test)
        except Broken as problem:
            console.print(f"mutants: {problem}", style="red", markup=False)
            return 2
    console.print(table)
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
