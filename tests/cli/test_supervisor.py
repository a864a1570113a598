"""Worker processes under a supervisor: they are restarted, signalled and killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from holdfast.cli import supervisor as supervisors
from holdfast.cli.supervisor import Supervisor
from holdfast.errors import InvalidOption
from tests.worker.support import TIMEOUT_S, eventually

#: Writes its pid, and ends at the first (or second) SIGTERM.
PROGRAM = """
import os, pathlib, signal, sys, time
folder, signals = pathlib.Path(sys.argv[1]), int(sys.argv[2])
received = []
signal.signal(signal.SIGTERM, lambda *_: received.append(1))
(folder / str(os.getpid())).touch()
while len(received) < signals:
    time.sleep(0.01)
"""


def command(folder: Path, signals: int = 1) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(folder), str(signals)]


def read_pids(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.iterdir()}


async def test_processes_are_replaced_and_stopped(tmp_path: Path) -> None:
    supervisor = Supervisor(command(tmp_path), 2, drain_grace_s=30)
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: len(read_pids(tmp_path)) == 2)
    assert set(supervisor.pids) == read_pids(tmp_path)
    victim = supervisor.pids[0]
    os.kill(victim, signal.SIGKILL)
    await eventually(lambda: len(read_pids(tmp_path)) == 3, "the killed one to be replaced")
    os.kill(next(pid for pid in supervisor.pids if pid != victim), signal.SIGTERM)
    await eventually(lambda: len(read_pids(tmp_path)) == 4, "one that ended well to be replaced")
    assert supervisor.restarts == 2
    supervisor.stop()
    async with asyncio.timeout(TIMEOUT_S):
        await running
    assert supervisor.pids == []


async def test_a_second_stop_signals_again(tmp_path: Path) -> None:
    supervisor = Supervisor(command(tmp_path, signals=2), 1, drain_grace_s=30)
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: read_pids(tmp_path))
    supervisor.stop()
    await asyncio.sleep(0)
    assert not running.done()
    # Two signals of one kind that arrive together count as one: wait until the first is handled.
    await eventually(lambda: _is_signal_handled(supervisor.pids[0]))
    supervisor.stop()
    async with asyncio.timeout(TIMEOUT_S):
        await running


def _is_signal_handled(pid: int) -> bool:
    pending = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("ShdPnd"))
    return int(pending.split()[1], 16) == 0


async def test_processes_that_do_not_end_are_killed(tmp_path: Path) -> None:
    supervisor = Supervisor(command(tmp_path, signals=99), 1, drain_grace_s=-14.9)
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: read_pids(tmp_path))
    supervisor.stop()
    async with asyncio.timeout(TIMEOUT_S):
        await running


async def test_a_cancelled_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    supervisor = Supervisor(command(tmp_path, signals=99), 1, drain_grace_s=30)
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: read_pids(tmp_path))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert supervisor.pids == []


def test_at_least_one_process_is_required() -> None:
    with pytest.raises(InvalidOption):
        Supervisor(["true"], 0, drain_grace_s=1)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of supervisors, which are recorded instead of waited for."""
    recorded: list[float] = []

    async def pause(_: Supervisor, seconds: float) -> None:
        recorded.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(Supervisor, "_pause", pause)
    return recorded


async def _run_until_restarted(supervisor: Supervisor) -> None:
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: supervisor.restarts >= 3, "three restarts")
    supervisor.stop()
    async with asyncio.timeout(TIMEOUT_S):
        await running


async def test_a_process_that_cannot_be_started_is_retried_after_a_pause(
    tmp_path: Path, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    await _run_until_restarted(Supervisor([str(tmp_path / "missing")], 1, drain_grace_s=1))
    assert len(pauses) >= 2
    assert all(pause >= 0.25 for pause in pauses)
    assert "cannot start worker process 0" in caplog.text


async def test_a_process_that_exits_with_0_too_soon_is_replaced_after_a_pause(pauses: list[float]) -> None:
    await _run_until_restarted(Supervisor(["true"], 1, drain_grace_s=1))
    assert len(pauses) >= 2


async def test_a_process_that_exits_with_0_later_is_replaced_at_once(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.cli.supervisor._SHORT_S", 0.0)
    await _run_until_restarted(Supervisor(["true"], 1, drain_grace_s=1))
    assert pauses == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_process_that_was_killed_is_replaced_at_once(
    tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Unless it ended soon after its start: then the next one might as well."""
    monkeypatch.setattr(supervisors, "_SHORT_S", 0.0)
    supervisor = Supervisor(command(tmp_path), 1, drain_grace_s=30)
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: len(read_pids(tmp_path)) == 1)
    os.kill(supervisor.pids[0], number)
    await eventually(lambda: len(read_pids(tmp_path)) == 2, "the killed one to be replaced")
    assert pauses == []
    monkeypatch.setattr(supervisors, "_SHORT_S", 600.0)
    os.kill(supervisor.pids[0], number)
    await eventually(lambda: len(read_pids(tmp_path)) == 3, "the killed one to be replaced")
    assert len(pauses) == 1
    supervisor.stop()
    async with asyncio.timeout(TIMEOUT_S):
        await running
