"""Types of the public API: mypy accepts valid calls and refuses invalid ones with the expected code."""

from __future__ import annotations

import re
from pathlib import Path

from mypy import api

CALLS = Path(__file__).parent / "calls.py"


def test_calls_are_typed_like_the_functions() -> None:
    root = CALLS.parents[2]
    report, problems, _ = api.run(
        ["--config-file", str(root / "pyproject.toml"), "--no-error-summary", "--hide-error-context", str(CALLS)]
    )
    assert not problems
    found = {
        (int(line), code)
        for line, code in re.findall(r"calls\.py:(\d+): error: .*\[([a-z-]+)\]$", report, re.MULTILINE)
    }
    expected = {
        (number, code)
        for number, line in enumerate(CALLS.read_text().splitlines(), 1)
        for code in re.findall(r"# error: ([a-z-]+)$", line)
    }
    assert found == expected, report
