"""A child process finds the task of a script, independent of earlier imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
from holdfast import Holdfast

app = Holdfast("sqlite://")

@app.task(process=True)
def hello() -> None: ...
"""

CHILD = """
import multiprocessing  # adds an alias of the main module, which is not the script
from holdfast.execution.spec import TaskLocation, load_task

location = TaskLocation("", "script.py", "hello")
print(load_task(location).name, load_task(location) is load_task(location))
"""


def test_a_script_is_found_after_multiprocessing_was_imported(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run([sys.executable, "-c", CHILD], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("hello True\n", "")
