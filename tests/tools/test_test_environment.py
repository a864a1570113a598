"""The tests do not depend on how they are started."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Sends SIGINT to a real program, and reads what it prints at a terminal.
PROBE = "tests/cli/test_terminal.py::test_watch_is_a_live_table_until_ctrl_c"


@pytest.mark.slow
def test_tests_pass_as_a_background_job_of_a_shell_with_other_settings(tmp_path: Path) -> None:
    """SIGINT is inherited as ignored, stdin is closed, and variables set other stores, width and colours."""
    outside = {
        "HOLDFAST_URL": "redis://127.0.0.1:1/0",
        "HOLDFAST_LEDGER": "postgresql://127.0.0.1:1/nowhere",
        "COLUMNS": "30",
        "NO_COLOR": "1",
        "PGHOST": "127.0.0.1",
        "PYTHONWARNINGS": "error",
    }
    pytest_probe = shlex.join([sys.executable, "-m", "pytest", "-q", "-c", f"{ROOT}/pyproject.toml", f"{ROOT}/{PROBE}"])
    done = subprocess.run(
        ["/bin/sh", "-c", f"trap '' INT; exec {pytest_probe} <&-"],
        cwd=tmp_path,
        env=os.environ | outside,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_signals_that_tests_send_are_not_ignored() -> None:
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
