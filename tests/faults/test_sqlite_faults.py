"""The file of the embedded engine: shared by processes, locked, full, read-only, damaged, missing."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast, State, Worker
from holdfast.errors import EngineUnavailable, HoldfastError, InvalidOption
from holdfast.operations.readiness import STARTING
from holdfast.sqlite import connection
from tests.faults.conftest import MakeSite
from tests.faults.support import Site, eventually
from tests.worker.support import working

pytestmark = [pytest.mark.faults]


def database_path(site: Site) -> Path:
    return Path(site.url.removeprefix("sqlite:///"))


def is_sound(path: Path) -> bool:
    """Return whether SQLite's integrity check passes."""
    with sqlite3.connect(path) as file:
        (answer,) = file.execute("PRAGMA integrity_check").fetchone()
    file.close()
    return bool(answer == "ok")


# Several processes -----------------------------------------------------------------------------------


async def test_killing_one_of_two_processes_on_one_file(sqlite_site: Site) -> None:
    """Two workers and a submitting process; a partial write of the killed worker has no effect."""
    site = sqlite_site
    workers = await site.start_workers(2, "--concurrency", "5")
    jobs = [job.id for job in await site.tasks.nap.submit_many((number, 0.05) for number in range(150))]
    jobs += [(await site.tasks.flaky.submit()).id for _ in range(10)]
    await eventually(lambda: len({run.pid for run in site.runs()}) == 2 and len(site.runs()) >= 50, "both to work")
    workers[0].kill()
    jobs += [job.id for job in await site.tasks.work.submit_many((number,) for number in range(50))]

    await site.assert_all_ended(jobs)
    runs = Counter(run.job_id for run in site.runs())
    assert set(jobs) == set(runs)
    workers[1].terminate()
    assert await workers[1].wait_ended() == 0
    await site.app.close()
    assert is_sound(database_path(site))


# Locked ----------------------------------------------------------------------------------------------

_LOCKER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the file from another program, which bypasses the queue of writers."""
    command = [sys.executable, "-c", _LOCKER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        yield
        other.communicate()


async def test_a_short_lock_delays_callers_and_workers(sqlite_site: Site) -> None:
    """Callers and workers wait, then continue."""
    site, gate = sqlite_site, sqlite_site.gate()
    async with working(site.app) as worker:
        blocked = await site.tasks.hold.submit(str(gate))
        await eventually(lambda: worker.running == 1, "a run")
        with locked(database_path(site)):
            waiting = [asyncio.ensure_future(site.tasks.work.submit(number)) for number in range(3)]
            gate.touch()
            await eventually(lambda: site.runs(blocked.id), "the run")
            assert not any(task.done() for task in waiting)
            # Reads still work.
            assert await blocked.state() is State.RUNNING
        jobs = [await task for task in waiting]
        await site.assert_all_ended([blocked.id, *(job.id for job in jobs)])
    assert len(site.runs()) == 4


async def test_a_long_lock_is_an_error(sqlite_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers get a clear error; a worker retries until the lock is released."""
    monkeypatch.setattr(connection, "BUSY_TIMEOUT_MS", 200)
    site, gate = sqlite_site, sqlite_site.gate()
    async with working(site.app) as worker:
        blocked = await site.tasks.hold.submit(str(gate))
        await eventually(lambda: worker.running == 1, "a run")
        with locked(database_path(site)):
            with pytest.raises(EngineUnavailable, match="another program has locked it"):
                await site.tasks.work.submit(1)
            gate.touch()
            await eventually(lambda: not worker.ready, "the worker to notice")
        job = await site.tasks.work.submit(2)
        await site.assert_all_ended([blocked.id, job.id])


# Full ------------------------------------------------------------------------------------------------


@contextmanager
def tiny_disk(folder: Path, kib: int) -> Iterator[Path]:
    """Mount a small file system. Requires root."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False) if os.geteuid() == 0 else None
    if mounted is None or mounted.returncode:
        reason = "only root can mount a small disk" if mounted is None else mounted.stderr.strip()
        if os.environ.get("CI") == "true" and mounted is None:
            pytest.fail(reason)
        pytest.skip(reason)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


async def _fill(site: Site) -> list[str]:
    """Submit large jobs until the disk is full. Return the ids of the accepted ones."""
    large = site.tasks.work.options(context={"padding": "x" * 20_000})
    accepted: list[str] = []
    while True:
        (job,) = await asyncio.gather(large.submit(1), return_exceptions=True)
        if isinstance(job, BaseException):
            assert isinstance(job, EngineUnavailable)
            assert "disk is full" in str(job)
            return accepted
        accepted.append(job.id)


async def test_a_full_disk(tmp_path: Path, make_site: MakeSite, caplog: pytest.LogCaptureFixture) -> None:
    """Submissions are refused and leave nothing; once there is space, all accepted jobs end."""
    with tiny_disk(tmp_path / "disk", 1_024) as disk:
        site = make_site(f"sqlite:///{disk / 'holdfast.db'}")
        accepted = await _fill(site)
        assert any(record.levelname == "CRITICAL" for record in caplog.records)
        with pytest.raises(EngineUnavailable, match="disk is full"):
            await site.tasks.work.submit_many((number,) for number in range(1_000))
        assert sum((await site.app.engine.stats("default")).states.values()) == len(accepted)

        # It may not be ready, not even for a moment, while the disk is full.
        worker = Worker(site.app)
        running = asyncio.create_task(worker.run())
        try:
            await eventually(lambda: worker.status != STARTING, "an attempt to claim")
            remount(disk, "size=16m")
            another = await site.tasks.work.submit(2)
            await site.assert_all_ended([*accepted, another.id])
            await eventually(lambda: worker.ready, "the worker to be ready")
        finally:
            worker.drain()
            await running
        assert len(site.runs()) == len(accepted) + 1
        await site.app.close()
        assert is_sound(disk / "holdfast.db")


# Read-only -------------------------------------------------------------------------------------------


@contextmanager
def read_only(folder: Path, path: Path) -> Iterator[None]:
    """Make the folder read-only. Permissions do not apply to root, so the whole file system is remounted."""
    if os.geteuid() == 0:
        remount(folder, "ro")
        try:
            yield
        finally:
            remount(folder, "rw")
        return
    paths = [folder, *folder.glob(f"{path.name}*")]
    for each in paths:
        each.chmod(0o555 if each.is_dir() else 0o444)
    try:
        yield
    finally:
        for each in paths:
            each.chmod(0o755 if each.is_dir() else 0o644)


async def test_a_read_only_file(tmp_path: Path, make_site: MakeSite) -> None:
    with tiny_disk(tmp_path / "disk", 16_384) as disk:
        path = disk / "holdfast.db"
        site = make_site(f"sqlite:///{path}")
        job = await site.tasks.work.submit(1)
        await site.app.close()
        with read_only(disk, path):
            with pytest.raises(EngineUnavailable, match=r"read-only|writable|write access"):
                await site.app.open()
            process = site.start()
            assert await process.wait_ended() == 3
            assert not process.has_logged("Traceback")
        async with working(site.app):
            await site.assert_all_ended([job.id])
        await site.app.close()


# Damaged, or foreign ---------------------------------------------------------------------------------


async def test_a_damaged_file_is_reported(sqlite_site: Site) -> None:
    site, path = sqlite_site, database_path(sqlite_site)
    jobs = await site.tasks.work.submit_many((number,) for number in range(500))
    await site.app.close()
    healthy = path.read_bytes()
    assert len(healthy) > 40 * 4096
    for damage in (b"not a database file" + healthy[19:], healthy[:4096] + os.urandom(len(healthy) - 4096)):
        path.write_bytes(damage)
        with pytest.raises(HoldfastError) as refused:
            await site.tasks.work.submit_many((number,) for number in range(500))
        assert isinstance(refused.value, EngineUnavailable | InvalidOption)
        assert str(path) in str(refused.value)
        assert "database" in str(refused.value)
        await site.app.close()
    # After restoring the copy, all jobs run.
    path.write_bytes(healthy)
    async with working(site.app):
        await site.assert_all_ended(job.id for job in jobs)
    assert len(site.runs()) == 500


async def test_a_file_of_another_program_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    with sqlite3.connect(path) as foreign:
        foreign.execute("CREATE TABLE notes (text)")
        foreign.execute("INSERT INTO notes VALUES ('mine')")
    foreign.close()
    before = path.read_bytes()
    app = Holdfast(f"sqlite:///{path}")
    with pytest.raises(InvalidOption, match="belongs to another program"):
        await app.open()
    await app.close()
    after = path.read_bytes()
    # Bytes 18 and 19 select the write-ahead log; all pages are unchanged.
    assert after[100:] == before[100:]


async def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path / 'nowhere' / 'holdfast.db'}")
    with pytest.raises(EngineUnavailable, match="directory must exist"):
        await app.open()


async def test_a_file_moved_while_a_worker_runs(sqlite_site: Site) -> None:
    """Nothing is written to the moved file; once it is back, the worker continues."""
    site, path = sqlite_site, database_path(sqlite_site)
    aside = path.with_name("aside.db")
    async with working(site.app):
        job = await site.tasks.work.submit(1)
        await job.result(60)
        path.rename(aside)
        with pytest.raises(EngineUnavailable):
            await site.tasks.work.submit(2)
        if path.exists():
            path.unlink()
        aside.rename(path)
        later = await eventually(lambda: _try_submit(site), "a submission to be accepted")
        await site.assert_all_ended([job.id, later.id])


async def _try_submit(site: Site) -> Any:
    try:
        return await site.tasks.work.submit(3)
    except EngineUnavailable:
        return None
