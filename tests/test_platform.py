"""On Windows there is one clear error, from the library and from the program."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast._platform import WINDOWS


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process whose platform is set to Windows."""
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
def test_the_library_raises_one_error(code: str) -> None:
    result = run(code)
    assert result.stderr.splitlines()[-1] == f"ImportError: {WINDOWS}"


@pytest.mark.parametrize("words", [["worker", "shop.py"], ["--help"], ["demo"]])
def test_the_program_prints_one_line(words: list[str]) -> None:
    result = run(f"sys.argv = ['holdfast', *{words}]; from holdfast.cli.main import main; main()")
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"holdfast: {WINDOWS}\n")


def test_the_version_is_printed() -> None:
    result = run("sys.argv = ['holdfast', '--version']; from holdfast.cli.main import main; main()")
    assert (result.returncode, result.stderr) == (0, "")
