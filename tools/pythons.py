"""Run the unit tests, and the tests of the engine on SQLite, on other Python releases with the built wheel.

    python -m tools.pythons list     list the installed releases
    python -m tools.pythons test     run the tests on them concurrently

A release that is not installed is skipped. Environments are kept in .pythons for the next run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / ".pythons"
REQUIREMENTS: Final = ROOT / "requirements" / "test.txt"
#: Besides 3.11, on which everything runs.
RELEASES: Final = ("3.12", "3.13")
#: Where version managers keep interpreters, below the home folder; `*` is the release and more.
MANAGED: Final = (".pyenv/versions/{}*/bin", ".local/share/uv/python/cpython-{}*/bin")
#: Tests that need neither servers nor further packages.
TESTS: Final = (
    "tests/unit",
    "tests/engine/sqlite",
    "tests/engine/test_contract.py",
    "tests/execution/test_locate.py",
    "tests/ledger/test_embedded.py",
    "tests/sqlite",
    "tests/test_aio.py",
    "tests/test_platform.py",
    "-m",
    "not redis and not postgres and not brokers and not faults and not search",
)
_PROBE: Final = "import ensurepip, sys, venv; print(*sys.version_info[:2], sep='.')"


def find(release: str) -> Path | None:
    """A working interpreter of this release: on PATH, else from a version manager."""
    for candidate in _candidates(release):
        done = subprocess.run([candidate, "-c", _PROBE], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == release:
            return candidate
    return None


def main(arguments: list[str]) -> int:
    if arguments not in (["list"], ["test"]):
        print(__doc__, file=sys.stderr)
        return 2
    found = {release: find(release) for release in RELEASES}
    for release, python in found.items():
        print(f"Python {release}: {python or 'not installed'}", flush=True)
    here = [(release, python) for release, python in found.items() if python is not None]
    if arguments == ["list"] or not here:
        return 0
    wheel = _build_wheel()
    with ThreadPoolExecutor(len(here)) as threads:
        codes = list(threads.map(lambda one: _test(one[0], one[1], wheel), here))
    return int(any(codes))


def _candidates(release: str) -> Iterator[Path]:
    name = f"python{release}"
    folders = [Path(part) for part in os.environ.get("PATH", "").split(os.pathsep) if part]
    for pattern in MANAGED:
        folders += sorted(Path.home().glob(pattern.format(release)), reverse=True)
    yield from (folder / name for folder in folders if (folder / name).is_file())


def _build_wheel() -> Path:
    folder = FOLDER / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _test(release: str, python: Path, wheel: Path) -> int:
    """Run the tests on one release. Prints the end of their output, or all of it if they fail."""
    log = FOLDER / f"{release}.log"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = 0
    with log.open("w") as output:
        for command in _commands(FOLDER / release, python, wheel):
            code = subprocess.call(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
            if code:
                break
    text = log.read_text(errors="replace")
    print(f"Python {release}:\n{text if code else ''.join(text.splitlines(keepends=True)[-3:])}", flush=True)
    return code


def _commands(folder: Path, python: Path, wheel: Path) -> Iterator[list[str]]:
    """Create the environment if it does not exist, install the wheel into it, run the tests."""
    own = str(folder / "bin" / "python")
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    stamp = folder / f"{digest}.stamp"
    if not stamp.exists():
        yield [str(python), "-m", "venv", "--clear", str(folder)]
        yield [*pip, "--require-hashes", "--requirement", str(REQUIREMENTS)]
        stamp.touch()
    yield [*pip, "--force-reinstall", str(wheel)]
    yield [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
