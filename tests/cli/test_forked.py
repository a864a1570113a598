"""A forked call of the program behaves like a started one; other tests rely on that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.cli.harness import TIMEOUT_S, Shell

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every call starts Python")

#: Prints its environment while it is loaded.
APP = """
import json, os, sys
from holdfast import Holdfast
app = Holdfast()
print(json.dumps({"here": os.getcwd(), "paths": sys.path[:3], "value": os.environ.get("VALUE"), "main": sys.argv[0],
                  "words": sys.argv[1:], "stdin": sys.stdin.read(), "files": sorted(os.listdir("/proc/self/fd"))}))
"""


def test_a_forked_call_has_the_environment_of_a_started_one(shell: Shell) -> None:
    (shell.folder / "probe.py").write_text(APP)
    (shell.folder / "input").write_text("from a file")
    command = shell.command("upkeep", "probe:missing")
    results = []
    for start in (forked.start, subprocess.Popen):
        with (shell.folder / "input").open() as file:
            process = start(
                command,
                cwd=shell.folder,
                env=shell.environment | {"VALUE": "set"},
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            out, errors = process.communicate(timeout=TIMEOUT_S)
        results.append((process.returncode, out, errors))
    assert results[0] == results[1]
    assert results[0][0] == 2
    assert '"stdin": "from a file"' in results[0][1]


def test_a_forked_call_is_a_child_of_this_process(shell: Shell) -> None:
    process = forked.start(
        shell.command("upkeep"), cwd=shell.folder, env=shell.environment, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stderr is not None
        assert b"upkeep started" in process.stderr.readline()
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert f"PPid:\t{os.getpid()}\n" in status
        assert os.getsid(process.pid) == process.pid
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert process.poll() is None
        process.send_signal(signal.SIGCONT)
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.communicate()
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)
