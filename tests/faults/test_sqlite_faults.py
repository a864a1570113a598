"""The embedded engine's file: shared by processes, locked, full, read-only, damaged, gone."""

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

from holdfast import Holdfast, State
from holdfast.errors import EngineUnavailable, HoldfastError, InvalidOption
from holdfast.sqlite import connection
from tests.faults.conftest import MakeSite
from tests.faults.support import Site, eventually
from tests.worker.support import working

pytestmark = [pytest.mark.faults]


def path_of(site: Site) -> Path:
    return Path(site.url.removeprefix("sqlite:///"))


def is_sound(path: Path) -> bool:
    """What SQLite itself says of the file."""
    with sqlite3.connect(path) as file:
        (answer,) = file.execute("PRAGMA integrity_check").fetchone()
    file.close()
    return bool(answer == "ok")


# Several processes -----------------------------------------------------------------------------------


async def test_two_processes_on_one_file_and_one_is_killed(sqlite_site: Site) -> None:
    """Both work, the test submits from a third; what the dead one had half written is nobody's problem."""
    site = sqlite_site
    workers = await site.started_all(2, "--concurrency", "5")
    jobs = [job.id for job in await site.tasks.nap.submit_many((number, 0.05) for number in range(150))]
    jobs += [(await site.tasks.flaky.submit()).id for _ in range(10)]
    await eventually(lambda: len({run.pid for run in site.runs()}) == 2 and len(site.runs()) >= 50, "both to work")
    workers[0].kill()
    jobs += [job.id for job in await site.tasks.work.submit_many((number,) for number in range(50))]

    await site.all_is_well(jobs)
    runs = Counter(run.job_id for run in site.runs())
    assert set(jobs) == set(runs)
    workers[1].terminate()
    assert await workers[1].ended() == 0
    await site.app.close()
    assert is_sound(path_of(site))


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
    """Another program holds the file in a transaction of its own, past our queue of writers."""
    command = [sys.executable, "-c", _LOCKER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        yield
        other.communicate()


async def test_locked_for_a_while(sqlite_site: Site) -> None:
    """Callers and workers wait, and then go on."""
    site, gate = sqlite_site, sqlite_site.gate()
    async with working(site.app) as worker:
        held = await site.tasks.hold.submit(str(gate))
        await eventually(lambda: worker.running == 1, "a run")
        with locked(path_of(site)):
            waiting = [asyncio.ensure_future(site.tasks.work.submit(number)) for number in range(3)]
            gate.touch()
            await eventually(lambda: site.runs(held.id), "the run")
            assert not any(task.done() for task in waiting)
            # Reading goes on meanwhile.
            assert await held.state() is State.RUNNING
        jobs = [await task for task in waiting]
        await site.all_is_well([held.id, *(job.id for job in jobs)])
    assert len(site.runs()) == 4


async def test_locked_for_too_long(sqlite_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clear error for callers; a worker tries until it may."""
    monkeypatch.setattr(connection, "BUSY_TIMEOUT_MS", 200)
    site, gate = sqlite_site, sqlite_site.gate()
    async with working(site.app) as worker:
        held = await site.tasks.hold.submit(str(gate))
        await eventually(lambda: worker.running == 1, "a run")
        with locked(path_of(site)):
            with pytest.raises(EngineUnavailable, match="another program has locked it"):
                await site.tasks.work.submit(1)
            gate.touch()
            await eventually(lambda: not worker.ready, "the worker to notice")
        job = await site.tasks.work.submit(2)
        await site.all_is_well([held.id, job.id])


# Full ------------------------------------------------------------------------------------------------


@contextmanager
def tiny_disk(folder: Path, kib: int) -> Iterator[Path]:
    """A file system that is soon full. Needs root."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False) if os.geteuid() == 0 else None
    if mounted is None or mounted.returncode:
        why = "only root can mount a small disk" if mounted is None else mounted.stderr.strip()
        if os.environ.get("CI") == "true" and mounted is None:
            pytest.fail(why)
        pytest.skip(why)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


async def _fill(site: Site) -> list[str]:
    """Submit large jobs until the disk is full; those that were accepted."""
    large = site.tasks.work.options(context={"padding": "x" * 20_000})
    accepted: list[str] = []
    while True:
        (job,) = await asyncio.gather(large.submit(1), return_exceptions=True)
        if isinstance(job, BaseException):
            assert isinstance(job, EngineUnavailable)
            assert "disk is full" in str(job)
            return accepted
        accepted.append(job.id)


async def test_a_disk_that_is_full(tmp_path: Path, make_site: MakeSite, caplog: pytest.LogCaptureFixture) -> None:
    """Submissions are refused and nothing of them is kept; with room again, all that was accepted ends."""
    with tiny_disk(tmp_path / "disk", 1_024) as disk:
        site = make_site(f"sqlite:///{disk / 'holdfast.db'}")
        accepted = await _fill(site)
        assert any(record.levelname == "CRITICAL" for record in caplog.records)
        with pytest.raises(EngineUnavailable, match="disk is full"):
            await site.tasks.work.submit_many((number,) for number in range(1_000))
        assert sum((await site.app.engine.stats("default")).states.values()) == len(accepted)

        async with working(site.app):
            remount(disk, "size=16m")
            more = await site.tasks.work.submit(2)
            await site.all_is_well([*accepted, more.id])
        assert len(site.runs()) == len(accepted) + 1
        await site.app.close()
        assert is_sound(disk / "holdfast.db")


# Read-only -------------------------------------------------------------------------------------------


@contextmanager
def read_only(folder: Path, path: Path) -> Iterator[None]:
    """Nobody may write there. Root may write anywhere, so for it the whole file system is made read-only."""
    if os.geteuid() == 0:
        remount(folder, "ro")
        try:
            yield
        finally:
            remount(folder, "rw")
        return
    places = [folder, *folder.glob(f"{path.name}*")]
    for place in places:
        place.chmod(0o555 if place.is_dir() else 0o444)
    try:
        yield
    finally:
        for place in places:
            place.chmod(0o755 if place.is_dir() else 0o644)


async def test_a_file_that_is_read_only(tmp_path: Path, make_site: MakeSite) -> None:
    with tiny_disk(tmp_path / "disk", 16_384) as disk:
        path = disk / "holdfast.db"
        site = make_site(f"sqlite:///{path}")
        job = await site.tasks.work.submit(1)
        await site.app.close()
        with read_only(disk, path):
            with pytest.raises(EngineUnavailable, match=r"read-only|writable|write access"):
                await site.app.open()
            process = site.start()
            assert await process.ended() == 3
            assert not process.said("Traceback")
        async with working(site.app):
            await site.all_is_well([job.id])
        await site.app.close()


# Damaged, or not ours --------------------------------------------------------------------------------


async def test_a_damaged_file_is_named_as_such(sqlite_site: Site) -> None:
    site, path = sqlite_site, path_of(sqlite_site)
    jobs = await site.tasks.work.submit_many((number,) for number in range(500))
    await site.app.close()
    healthy = path.read_bytes()
    assert len(healthy) > 40 * 4096
    for damage in (b"this is no database" + healthy[19:], healthy[:4096] + os.urandom(len(healthy) - 4096)):
        path.write_bytes(damage)
        with pytest.raises(HoldfastError) as refused:
            await site.tasks.work.submit_many((number,) for number in range(500))
        assert isinstance(refused.value, EngineUnavailable | InvalidOption)
        assert str(path) in str(refused.value)
        assert "database" in str(refused.value)
        await site.app.close()
    # With the copy back in place, everything is there.
    path.write_bytes(healthy)
    async with working(site.app):
        await site.all_is_well(job.id for job in jobs)
    assert len(site.runs()) == 500


async def test_a_file_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    with sqlite3.connect(path) as theirs:
        theirs.execute("CREATE TABLE notes (text)")
        theirs.execute("INSERT INTO notes VALUES ('mine')")
    theirs.close()
    before = path.read_bytes()
    app = Holdfast(f"sqlite:///{path}")
    with pytest.raises(InvalidOption, match="belongs to another program"):
        await app.open()
    await app.close()
    after = path.read_bytes()
    # Bytes 18 and 19 say whether a write-ahead log is used; every page of theirs is as it was.
    assert after[100:] == before[100:]


async def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path / 'nowhere' / 'holdfast.db'}")
    with pytest.raises(EngineUnavailable, match="directory must exist"):
        await app.open()


async def test_a_file_that_is_moved_away_under_a_worker(sqlite_site: Site) -> None:
    """Nothing is written into a file that nobody can find; once it is back, work goes on."""
    site, path = sqlite_site, path_of(sqlite_site)
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
        later = await eventually(lambda: _submitted(site), "a submission to be taken")
        await site.all_is_well([job.id, later.id])


async def _submitted(site: Site) -> Any:
    try:
        return await site.tasks.work.submit(3)
    except EngineUnavailable:
        return None
