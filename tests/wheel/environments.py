"""Clean environments with holdfast's wheel in them, made once for all processes of a test run.

`base` has the wheel alone. The environment of an extra has what that extra brings on top, and reads the rest from
`base`; that of `all` reads from all of the others.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from holdfast.extras import EXTRAS
from tests.wheel import inside
from tests.wheel.inside import Plan, Report
from tests.wheel.wheelhouse import build

BASE: Final = "base"
ALL: Final = "all"
#: Every environment that there is.
NAMES: Final = (BASE, *EXTRAS, ALL)
#: Python, imports and a slow machine.
PATIENCE_S: Final = 300

_PYTHON: Final = f"python{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True)
class Environment:
    """A clean environment. Programs run in a folder, with no variable of the developer's own."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        return self.folder / "lib" / _PYTHON / "site-packages"

    def run(self, *words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """`python …` to its end."""
        with self.start(*words, cwd=cwd, **variables) as process:
            try:
                out, errors = process.communicate(timeout=PATIENCE_S)
            finally:
                process.kill()
        return subprocess.CompletedProcess(words, process.returncode, out, errors)

    def carry_out(self, plan: Plan, folder: Path) -> Report:
        """The plan, by `inside.py` in this environment."""
        (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
        done = self.run(str(Path(inside.__file__)), "plan.json", cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return msgspec.json.decode(done.stdout, type=Report)

    def start(self, *words: str, cwd: Path, **variables: str) -> subprocess.Popen[str]:
        """`python …`, running."""
        return subprocess.Popen(
            [self.python, *words],
            cwd=cwd,
            env={"PATH": os.defpath, "HOME": str(cwd), "LANG": "C.UTF-8", **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


class Environments:
    """Makes them when they are first asked for; other processes of the test run wait, and take the same ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def get(self, name: str) -> Environment:
        """The environment of an extra, `base` or `all`."""
        environment = Environment(self._folder / name)
        if name == BASE:
            below: list[str] = []
        else:
            below = [BASE, *(EXTRAS if name == ALL else ())]
        # Each has a lock of its own, taken one after the other: a process that makes one does not block the rest.
        paths = [self.get(one).packages for one in below]
        with self._once(name) as missing:
            if missing:
                self._make(environment, name, paths)
        return environment

    def wheel(self) -> Path:
        """holdfast's own, with those of all packages beside it."""
        folder = self._folder / "wheels"
        with self._once("wheels") as missing:
            if missing:
                build(folder)
        (wheel,) = folder.glob("holdfast-*.whl")
        return wheel

    def pip(self, environment: Environment, *words: str) -> str:
        """What pip prints; the developer's own settings and the network are left out."""
        command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "--no-cache-dir"]
        done = subprocess.run([*command, "--python", environment.python, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, environment: Environment, extra: str = "") -> str:
        """`pip install` of the wheel, or of the wheel with an extra."""
        wheel = self.wheel()
        wanted = f"{wheel}[{extra}]" if extra else str(wheel)
        return self.pip(environment, "install", "--no-index", "--no-compile", "--find-links", str(wheel.parent), wanted)

    def _make(self, environment: Environment, name: str, paths: list[Path]) -> None:
        venv.EnvBuilder(symlinks=True, clear=True).create(environment.folder)
        if paths:
            (environment.packages / "below.pth").write_text("".join(f"{path}\n" for path in paths))
        if name != ALL:
            self.install(environment, "" if name == BASE else name)

    @contextmanager
    def _once(self, name: str) -> Iterator[bool]:
        """Whether it has to be made, while nobody else makes it. A block that raises has not made it."""
        stamp = self._folder / f"{name}.made"
        with (self._folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            missing = not stamp.exists()
            yield missing
            if missing:
                stamp.touch()


def settings(**values: str) -> Mapping[str, str]:
    """Environment variables of holdfast's settings."""
    return {f"HOLDFAST_{name.upper()}": value for name, value in values.items()}
