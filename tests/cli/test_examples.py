"""The examples do what the README says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cli.harness import EXAMPLES, SOURCE, environment


def test_the_quickstart(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "quickstart.py")],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == "order-7: 19.99 charged\n", done.stderr
    assert done.returncode == 0


def test_the_readme_has_the_quickstart() -> None:
    code = (EXAMPLES / "quickstart.py").read_text(encoding="utf-8").split('"""\n', 1)[1].strip()
    assert code in (SOURCE.parent / "README.md").read_text(encoding="utf-8")
