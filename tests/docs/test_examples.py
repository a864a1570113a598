"""Every Python block of README and docs runs, on SQLite, page by page from top to bottom."""

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


def printed_by(page: Path) -> str:
    """What the page says that its code prints; empty if it says nothing."""
    return "".join(_PRINTS.findall(page.read_text(encoding="utf-8")))


PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if code_of(page)]


def run(page: Path, place: Path) -> subprocess.CompletedProcess[str]:
    (place / "example.py").write_text(code_of(page), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    command = [sys.executable, "-W", "error", "example.py"]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False, timeout=50)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page_s_code_runs_and_prints_what_the_page_says(page: Path, tmp_path: Path) -> None:
    done = run(page, tmp_path)
    assert done.returncode == 0, done.stderr
    said = printed_by(page)
    if said:
        assert done.stdout == said


def test_the_readme_s_example_charges_once(tmp_path: Path) -> None:
    for _ in range(2):  # the second run meets the same idempotency key in the same file
        done = run(ROOT / "README.md", tmp_path)
        assert (done.returncode, done.stdout) == (0, README_PRINTS), done.stderr
