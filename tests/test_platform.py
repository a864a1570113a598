"""On Windows there is one clear error, from the library and from the program."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast._platform import WINDOWS


def run(code: str) -> subprocess.CompletedProcess[str]:
    """A process that takes its platform for Windows."""
    text = f"import sys; sys.platform = 'win32'; {code}"
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "code",
    [
        "from holdfast import Holdfast",
        "import holdfast; holdfast.Worker",
        "from holdfast.effects import effect_table",
        "from holdfast.testing import ManualClock",
        "import holdfast.mongo",
    ],
)
def test_the_library_says_so(code: str) -> None:
    done = run(code)
    assert done.stderr.splitlines()[-1] == f"ImportError: {WINDOWS}"


@pytest.mark.parametrize("words", [["worker", "shop.py"], ["--help"], ["demo"]])
def test_the_program_says_so_in_one_line(words: list[str]) -> None:
    done = run(f"sys.argv = ['holdfast', *{words}]; from holdfast.cli.main import main; main()")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"holdfast: {WINDOWS}\n")


def test_the_version_can_be_asked() -> None:
    done = run("sys.argv = ['holdfast', '--version']; from holdfast.cli.main import main; main()")
    assert (done.returncode, done.stderr) == (0, "")
