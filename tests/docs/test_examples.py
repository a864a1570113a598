"""All Python blocks of README and docs run on SQLite, page by page from top to bottom."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
README_PRINTS = "order-7: 19.99 charged\n"
_PRINTS = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code_of(page: Path) -> str:
    return "\n\n".join(_BLOCK.findall(page.read_text(encoding="utf-8")))


def get_shown_output(page: Path) -> str:
    """Return the output that the page shows for its code; empty if it shows none."""
    return "".join(_PRINTS.findall(page.read_text(encoding="utf-8")))


PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if code_of(page)]


def run(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "example.py").write_text(code_of(page), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    command = [sys.executable, "-W", "error", "example.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=50)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs_and_prints_the_shown_output(page: Path, tmp_path: Path) -> None:
    done = run(page, tmp_path)
    assert done.returncode == 0, done.stderr
    shown = get_shown_output(page)
    if shown:
        assert done.stdout == shown


def test_the_readme_example_charges_once(tmp_path: Path) -> None:
    for _ in range(2):  # the second run has the same idempotency key in the same file
        done = run(ROOT / "README.md", tmp_path)
        assert (done.returncode, done.stdout) == (0, README_PRINTS), done.stderr
