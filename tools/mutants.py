"""Remove one safety check at a time and verify that a test fails.

`tools/mutants.toml` lists the mutants: for each suite of tests, exact texts to replace. Each is applied to a copy of
`src` in a temporary folder, and the suite runs against that copy: an engine's contract tests, the tests of what
processes do around an engine, or those of Sentinel and Cluster. A mutant is *killed* when a test fails while
the smoke test still passes: a copy that cannot run at all proves nothing. Exit 0 only if every mutant was killed.
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
    """One exact text in one file, and its replacement."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """One removed safety check of one engine."""

    check: str
    engine: str
    patches: tuple[Patch, ...]


@dataclass(frozen=True, slots=True)
class Suite:
    """By engine: pytest arguments for the whole suite and for the smoke test."""

    tests: dict[str, list[str]]
    smoke: dict[str, list[str]]


class Broken(Exception):
    """The tool cannot continue: a patch does not match, or the suite fails without a mutant."""


def load() -> tuple[Suite, list[Mutant]]:
    data = tomllib.loads(LIST.read_text(encoding="utf-8"))
    mutants = [
        Mutant(entry["check"], entry["engine"], tuple(Patch(**patch) for patch in entry["patch"]))
        for entry in data["mutant"]
    ]
    return Suite(data["tests"], data["smoke"]), mutants


def apply(mutant: Mutant, source: Path) -> None:
    """Patch the copy; every old text must occur exactly once."""
    for patch in mutant.patches:
        path = source / patch.file
        text = path.read_text(encoding="utf-8")
        if text.count(patch.old) != 1:
            raise Broken(
                f"{mutant.check} on {mutant.engine}: text found {text.count(patch.old)} times in {patch.file}, "
                f"must occur once; update tools/mutants.toml:\n{patch.old}"
            )
        path.write_text(text.replace(patch.old, patch.new), encoding="utf-8")


def run(source: Path, arguments: Sequence[str]) -> tuple[bool, str]:
    """Whether pytest passes on this copy, and the first test that fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=RUN_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return False, "(timed out)"
    if done.returncode == 0:
        return True, ""
    if done.returncode != 1:
        raise Broken(f"pytest failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    first = _FAILED.search(done.stdout)
    return False, first[1] if first else "(unnamed)"


def judge(mutant: Mutant, suite: Suite, source: Path) -> tuple[bool, str]:
    """Whether the mutant was killed, and by which test."""
    apply(mutant, source)
    passed, test = run(source, suite.tests[mutant.engine])
    if passed:
        return False, ""
    runs, smoke = run(source, suite.smoke[mutant.engine])
    if not runs:
        raise Broken(f"{mutant.check} on {mutant.engine} fails the smoke test {smoke}, so it proves nothing")
    return True, test


def check_baseline(engine: str, suite: Suite, source: Path) -> None:
    """Require that all tests pass without a mutant, and that they run the copy."""
    imported = subprocess.run(
        [sys.executable, "-c", "import holdfast.errors; print(holdfast.errors.__file__)"],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=True,
    )
    if not imported.stdout.startswith(str(source)):
        raise Broken(f"the tests do not run the copy: {imported.stdout}")
    passed, test = run(source, suite.tests[engine])
    if not passed:
        raise Broken(f"the suite of {engine} fails without a mutant: {test}")


def copied(folder: Path, name: str) -> Path:
    """Make a fresh copy of `src`."""
    return Path(shutil.copytree(ROOT / "src", folder / name, ignore=shutil.ignore_patterns("__pycache__")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engine", action="append", help="Only this engine; can be repeated.")
    parser.add_argument("--check", default="", help="Only mutants whose check contains this text.")
    options = parser.parse_args()
    console = Console(width=140)
    suite, mutants = load()
    chosen = [
        mutant
        for mutant in mutants
        if options.check in mutant.check and (not options.engine or mutant.engine in options.engine)
    ]
    survivors = 0
    table = Table("removed check", "engine", "verdict", "first failing test", title="mutants")
    with tempfile.TemporaryDirectory(prefix="holdfast-mutants-") as name:
        folder = Path(name)
        try:
            for engine in sorted({mutant.engine for mutant in chosen}):
                console.print(f"{engine}: without a mutant …")
                check_baseline(engine, suite, copied(folder, f"baseline-{engine}"))
            for number, mutant in enumerate(chosen):
                killed, test = judge(mutant, suite, copied(folder, f"mutant-{number}"))
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
