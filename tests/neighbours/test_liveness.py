"""Whether a process still runs: each case of the rules, and real processes."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.neighbours.host import Host, parse_stat, read_host, read_stat
from holdfast.neighbours.liveness import Liveness, check_liveness
from tests.neighbours.conftest import StartProgram

HOST = Host("boot", "host", 1, 2)


def fake_proc(folder: Path, state: str, started_at: int, threads: dict[str, str] | None = None) -> Path:
    """A /proc with process 17, and with these threads."""

    def stat(state: str) -> str:
        return f"17 (a) b) {state} 1 {'0 ' * 17}{started_at} 0 0"

    (folder / "17").mkdir(parents=True)
    (folder / "17/stat").write_text(stat(state))
    for thread, thread_state in (threads or {}).items():
        (folder / "17/task" / thread).mkdir(parents=True)
        (folder / "17/task" / thread / "stat").write_text(stat(thread_state))
    return folder


def raising(error: type[OSError] | None) -> Callable[[int, int], None]:
    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (17, 0)
        if error is not None:
            raise error

    return kill


@pytest.mark.parametrize(
    ("error", "state", "started_at", "threads", "expected"),
    [
        (None, "S", 99, None, Liveness.ALIVE),
        (None, "T", 99, None, Liveness.ALIVE),
        (None, "D", 99, None, Liveness.ALIVE),
        (PermissionError, "S", 99, None, Liveness.ALIVE),
        (ProcessLookupError, "S", 99, None, Liveness.DEAD),
        (None, "S", 100, None, Liveness.DEAD),
        (PermissionError, "S", 98, None, Liveness.DEAD),
        (None, "Z", 99, {"17": "Z"}, Liveness.DEAD),
        (None, "Z", 99, {"17": "Z", "18": "X", "19": "Z"}, Liveness.DEAD),
        (None, "Z", 99, {"17": "Z", "18": "S"}, Liveness.ALIVE),
        # Its threads cannot be read.
        (None, "Z", 99, None, Liveness.ALIVE),
        (OSError, "S", 99, None, Liveness.UNKNOWN),
    ],
)
def test_a_process(
    tmp_path: Path,
    error: type[OSError] | None,
    state: str,
    started_at: int,
    threads: dict[str, str] | None,
    expected: Liveness,
) -> None:
    proc = fake_proc(tmp_path, state, started_at, threads)
    assert check_liveness(17, 99, HOST, HOST, proc=proc, kill=raising(error)) is expected


@pytest.mark.parametrize("error", [None, PermissionError])
def test_a_process_that_proc_does_not_show_is_unknown(tmp_path: Path, error: type[OSError] | None) -> None:
    assert check_liveness(17, 99, HOST, HOST, proc=tmp_path, kill=raising(error)) is Liveness.UNKNOWN
    (tmp_path / "17").mkdir()
    for content in ("", "17 (x) S 1", "17 (x) S" + " x" * 40, "17 (x) S" + " 9" * 30 + "9" * 5_000):
        (tmp_path / "17/stat").write_text(content)
        found = parse_stat(content.encode())
        expected = Liveness.UNKNOWN if found is None else Liveness.DEAD
        assert check_liveness(17, 99, HOST, HOST, proc=tmp_path, kill=raising(error)) is expected


@pytest.mark.parametrize("change", [{"boot_id": "b"}, {"name": "b"}, {"pid_namespace": 9}, {"time_namespace": 9}])
def test_a_process_of_another_host_or_namespace_is_unknown(change: dict[str, Any]) -> None:
    def kill(pid: int, number: int) -> None:
        raise AssertionError("its pid means nothing here")

    other = msgspec.structs.replace(HOST, **change)
    assert check_liveness(17, 99, other, HOST, kill=kill) is Liveness.UNKNOWN
    assert check_liveness(17, 99, HOST, None, kill=kill) is Liveness.UNKNOWN
    for pid in (0, -1, -17):
        assert check_liveness(pid, 99, HOST, HOST, kill=kill) is Liveness.UNKNOWN


def test_a_host_without_its_own_proc_is_unknown(tmp_path: Path) -> None:
    assert read_host(tmp_path) is None
    (tmp_path / "self").symlink_to(str(os.getpid() + 1))
    assert read_host(tmp_path) is None
    own = read_host()
    assert own is not None
    assert own.boot_id
    assert own.pid_namespace > 0


# Real processes ---------------------------------------------------------------------------------------


def judge(pid: int, later: int = 0) -> Liveness:
    """Judge a process; `later` shifts its recorded start."""
    stat, host = read_stat(pid), read_host()
    assert stat is not None
    assert host is not None
    return check_liveness(pid, stat.started_at + later, host, host)


def test_a_process_is_alive_until_it_is_killed(start: StartProgram) -> None:
    process = start()
    stat, host = read_stat(process.pid), read_host()
    assert stat is not None
    assert host is not None

    def now() -> Liveness:
        return check_liveness(process.pid, stat.started_at, host, host)

    assert now() is Liveness.ALIVE
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert now() is Liveness.ALIVE
    # Another process would have had its pid before.
    assert judge(process.pid, later=-1) is Liveness.DEAD
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    zombie = read_stat(process.pid)
    assert zombie is not None
    assert zombie.state == "Z"
    assert now() is Liveness.DEAD
    process.wait()
    assert now() is Liveness.DEAD


_SYS_EXIT = {"x86_64": 60, "aarch64": 93}

#: The first thread ends, another one continues.
_ZOMBIE_LEADER = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall(int(sys.argv[1]), 0)
"""


@pytest.mark.skipif(platform.machine() not in _SYS_EXIT, reason="needs the number of the system call")
def test_a_process_whose_first_thread_has_ended_is_alive() -> None:
    command = [sys.executable, "-c", _ZOMBIE_LEADER, str(_SYS_EXIT[platform.machine()])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while (stat := read_stat(process.pid)) is not None and stat.state != "Z":
            assert process.poll() is None
        assert judge(process.pid) is Liveness.ALIVE
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert judge(process.pid) is Liveness.DEAD
    finally:
        process.kill()
        process.communicate()
