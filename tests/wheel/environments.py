"""Clean environments with holdfast's wheel, created once for all processes of a test run.

`base` has the wheel alone. The environment of an extra has the packages that the extra adds and reads the rest from
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
#: All environments.
NAMES: Final = (BASE, *EXTRAS, ALL)
#: Enough for starting Python and its imports on a slow machine.
TIMEOUT_S: Final = 300

_PYTHON: Final = f"python{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True)
class Environment:
    """A clean environment. Programs run in a folder, without the developer's environment variables."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        return self.folder / "lib" / _PYTHON / "site-packages"

    def run(self, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `python …` to its end."""
        with self.start(*arguments, cwd=cwd, **variables) as process:
            try:
                out, errors = process.communicate(timeout=TIMEOUT_S)
            finally:
                process.kill()
        return subprocess.CompletedProcess(arguments, process.returncode, out, errors)

    def run_plan(self, plan: Plan, folder: Path) -> Report:
        """Run the plan by `inside.py` in this environment."""
        (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
        done = self.run(str(Path(inside.__file__)), "plan.json", cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return msgspec.json.decode(done.stdout, type=Report)

    def start(self, *arguments: str, cwd: Path, **variables: str) -> subprocess.Popen[str]:
        """Start `python …`."""
        return subprocess.Popen(
            [self.python, *arguments],
            cwd=cwd,
            env={"PATH": os.defpath, "HOME": str(cwd), "LANG": "C.UTF-8", **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


class Environments:
    """Creates environments on first use; other processes of the test run wait and use the same ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def get(self, name: str) -> Environment:
        """Return the environment of an extra, `base` or `all`."""
        environment = Environment(self._folder / name)
        if name == BASE:
            lower: list[str] = []
        else:
            lower = [BASE, *(EXTRAS if name == ALL else ())]
        # One lock for each, acquired in sequence: a process that creates one does not block the others.
        paths = [self.get(one).packages for one in lower]
        with self._once(name) as missing:
            if missing:
                self._make(environment, name, paths)
        return environment

    def wheel(self) -> Path:
        """Return holdfast's wheel, in a folder with the wheels of all packages."""
        folder = self._folder / "wheels"
        with self._once("wheels") as missing:
            if missing:
                build(folder)
        (wheel,) = folder.glob("holdfast-*.whl")
        return wheel

    def pip(self, environment: Environment, *arguments: str) -> str:
        """Run pip without the developer's settings. Return its output."""
        command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "--no-cache-dir"]
        done = subprocess.run([*command, "--python", environment.python, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, environment: Environment, extra: str = "") -> str:
        """Run `pip install` for the wheel, or for the wheel with an extra."""
        wheel = self.wheel()
        requirement = f"{wheel}[{extra}]" if extra else str(wheel)
        return self.pip(
            environment, "install", "--no-index", "--no-compile", "--find-links", str(wheel.parent), requirement
        )

    def _make(self, environment: Environment, name: str, paths: list[Path]) -> None:
        venv.EnvBuilder(symlinks=True, clear=True).create(environment.folder)
        if paths:
            (environment.packages / "below.pth").write_text("".join(f"{path}\n" for path in paths))
        if name != ALL:
            self.install(environment, "" if name == BASE else name)

    @contextmanager
    def _once(self, name: str) -> Iterator[bool]:
        """Yield whether it has to be created, under a lock. If the block raises, it counts as not created."""
        marker = self._folder / f"{name}.made"
        with (self._folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            missing = not marker.exists()
            yield missing
            if missing:
                marker.touch()


def settings(**values: str) -> Mapping[str, str]:
    """Environment variables of holdfast's settings."""
    return {f"HOLDFAST_{name.upper()}": value for name, value in values.items()}
