"""A chaos run that is killed with -9 leaves no process, no mount and no data; nor does one whose reaper is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from holdfast.verification.chaos.reaper import Reaper, processes_of, reap_stale

pytestmark = [pytest.mark.faults, pytest.mark.redis, pytest.mark.postgres]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`holdfast chaos` under load, with its own folder for temporary files."""
    (tmp_path / "tmp").mkdir()
    words = ["chaos", "--jobs", "100000", "--faults", "0", "--rate", "20", "--workers", "1", "--seed", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", *words, "--folder", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path / "tmp")},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait(lambda: b"accepted" in (tmp_path / "run" / "journal.jsonl").read_bytes(), "jobs to be accepted")
        yield process
    finally:
        process.kill()
        process.wait()


def wait(is_true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            if is_true():
                return
        except FileNotFoundError:
            pass
        assert time.monotonic() < deadline, f"timeout while waiting for {what}"
        time.sleep(0.05)


def ledger_of(folder: Path) -> str:
    """PostgreSQL's folder, read from its command line."""
    for pid in processes_of(str(folder)):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if "-D" in words:
            return str(Path(words[words.index("-D") + 1]).parent.parent)
    raise LookupError(f"no ledger of {folder}")


def mounts(*folders: str) -> list[str]:
    rows = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return [row for row in rows if row.startswith(folders)]


def test_a_killed_run_leaves_only_logs(running: subprocess.Popen[bytes], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ledger = ledger_of(folder)
    assert len(processes_of(str(folder))) > 5
    assert len(mounts(str(folder), ledger)) == (2 if os.geteuid() == 0 else 0)
    # Not even a stopped process is left.
    os.kill(processes_of(str(folder))[-1], signal.SIGSTOP)
    running.kill()
    wait(lambda: not list((tmp_path / "tmp").glob("holdfast-chaos-run-*")), "the reaper to end")
    assert processes_of(str(folder)) == []
    assert not Path(ledger).exists()
    assert not (folder / "redis" / "disk").exists()
    assert mounts(str(folder), ledger) == []
    assert (folder / "worker-1.log").exists()
    assert (folder / "journal.jsonl").exists()


#: A small run: a reaper, a disk, and a process that writes its log. Prints the reaper's pid.
SMALL: Final = """
import subprocess, sys, time
from pathlib import Path
from holdfast.verification.chaos.parts import Disk
from holdfast.verification.chaos.reaper import Reaper
folder = Path(sys.argv[1])
disk = Disk(folder / "disk", 1_000_000)
reaper = Reaper(folder, [disk.folder])
disk.mount()
log = (folder / "log").open("wb")
subprocess.Popen(["sleep", "60"], stdout=log, stderr=log, start_new_session=True)
print(reaper.pid, flush=True)
time.sleep(60)
"""


def test_the_next_run_cleans_up_if_the_reaper_is_killed_too(tmp_path: Path) -> None:
    folder, temporary = tmp_path / "run", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)}
    words = [sys.executable, "-c", SMALL, str(folder)]
    with subprocess.Popen(words, env=variables, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        reaper = int(run.stdout.readline())
        assert reap_stale(temporary) == [], "it is still running"
        os.kill(reaper, signal.SIGKILL)
        run.kill()
    assert len(processes_of(str(folder))) == 1
    assert len(mounts(str(folder))) == (os.geteuid() == 0)
    assert reap_stale(temporary) == [str(folder)]
    assert processes_of(str(folder)) == []
    assert mounts(str(folder)) == []
    assert os.listdir(folder) == ["log"]
    assert reap_stale(temporary) == []


def test_a_record_of_another_user_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record names what is to be deleted."""
    record, data = tmp_path / "holdfast-chaos-run-x", tmp_path / "data"
    data.mkdir()
    dead = f"999999999 1 {os.readlink('/proc/self/ns/pid')}"
    record.write_text(json.dumps({"owner": dead, "folder": str(tmp_path), "data": [str(data)]}))
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert reap_stale(tmp_path) == []
    assert data.exists()


def test_a_released_reaper_deletes_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(["sleep", "60"], stdout=log, stderr=log)
    try:
        assert processes_of(str(tmp_path)) == [process.pid]
        reaper = Reaper(tmp_path, [data])
        reaper.release()
        reaper.release()
        assert process.poll() is None
        assert data.exists()
    finally:
        process.kill()
        process.wait()


def test_a_reader_of_logs_is_not_a_process_of_the_run(tmp_path: Path) -> None:
    """Nor is a process that only writes its errors there."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        reader = subprocess.Popen(["tail", "-f", str(log)], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=file)
    try:
        assert processes_of(str(tmp_path)) == []
    finally:
        reader.kill()
        reader.wait()
