"""Watching the processes of a host: the leases of those that have ended expire, those of all others stay."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from holdfast.core.job import new_job_ids
from holdfast.errors import EngineUnavailable
from holdfast.identity import new_identity, parse_identity
from holdfast.neighbours import watch as watch_module
from holdfast.neighbours.record import ProcessFacts, ProcessRecord, describe_process
from holdfast.neighbours.watch import Neighbours, identify_store
from tests.neighbours.conftest import RECORD, WAIT, StartProgram, write
from tests.worker.support import eventually


class Leases:
    """The leases of workers that an engine has; expires two at a time."""

    def __init__(self, **counts: int) -> None:
        self.counts = counts
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.is_down = False

    async def expire_leases(self, worker: str, queues: Sequence[str]) -> int:
        self.calls.append((worker, tuple(queues)))
        if self.is_down:
            raise EngineUnavailable("made to fail by the test")
        count = min(2, self.counts.get(worker, 5))
        self.counts[worker] = self.counts.get(worker, 5) - count
        return count


class Watch:
    """A watch of the test's directory, and how often it has asked for a reclaim."""

    def __init__(self, folder: Path, record: ProcessRecord | None = None) -> None:
        self.leases = Leases()
        self.reclaims = 0
        self.neighbours = Neighbours(self.leases, "store", self._on_dead, record=record, path=folder)

    def _on_dead(self) -> None:
        self.reclaims += 1

    async def check(self) -> list[str]:
        """The workers whose leases this check has let expire, once for each call."""
        before = len(self.leases.calls)
        await self.neighbours.run_once()
        return [worker for worker, _ in self.leases.calls[before:]]


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def own_facts(store: str = "store") -> ProcessFacts:
    facts = describe_process(new_identity(), store, ["default"])
    assert facts is not None
    return facts


def dead_facts(store: str = "store") -> ProcessFacts:
    """A former process with this pid."""
    return msgspec.structs.replace(own_facts(store), started_at=1)


async def test_leases_of_a_killed_process_expire_at_the_next_check(folder: Path, start: StartProgram) -> None:
    waiting = new_job_ids(3)
    jobs = f"record.set_waiting({waiting!r}); record.mark_started()\n"
    victim, other, survivor = start(RECORD + jobs + WAIT), start(store="other"), start()
    watch = Watch(folder)
    assert await watch.check() == []
    survivor.send_signal(signal.SIGSTOP)
    kill(victim)
    kill(other)
    calls = await watch.check()
    (identity,) = set(calls)
    named = parse_identity(identity)
    assert named is not None
    assert named.pid == victim.pid
    # Two at a time, until there are none.
    assert len(calls) == 4
    assert watch.leases.calls[0] == (identity, ("default", "mail"))
    assert watch.reclaims == 3
    started = [watch.neighbours.has_started(identity, job_id) for job_id in [*waiting, "unlisted"]]
    assert started == [True, False, False, True]
    assert watch.neighbours.has_started("another worker", waiting[2])
    # A claim on its way may arrive later: it is asked for again, but not for ever.
    assert [await watch.check() for _ in range(3)] == [[identity], [identity], []]
    assert watch.reclaims == 3


async def test_the_end_of_a_process_starts_a_check(
    folder: Path, start: StartProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "_INTERVAL_S", 600.0)
    victims, watch = [start(), start()], Watch(folder)
    descriptors = len(os.listdir("/proc/self/fd"))
    running = asyncio.create_task(watch.neighbours.run())
    await eventually(lambda: len(os.listdir("/proc/self/fd")) == descriptors + 2, "both to be watched")
    for victim in victims:
        victim.kill()
    await eventually(lambda: len(watch.neighbours.dead) == 2, "a check")
    await eventually(lambda: watch.reclaims == 6, "a reclaim")
    victims.append(start())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1


async def test_a_check_is_repeated_after_an_outage_of_the_engine(folder: Path) -> None:
    write(dead_facts(), folder)
    watch = Watch(folder)
    watch.leases.is_down = True
    assert len(await watch.check()) == 1
    assert len(await watch.check()) == 1
    watch.leases.is_down = False
    assert len(await watch.check()) == 4


async def test_leases_of_a_living_process_are_not_touched(folder: Path) -> None:
    """Its pid was used before, and its own record says that it started at another time: it keeps them."""
    own = own_facts()
    record, former = write(own, folder), write(dead_facts(), folder)
    forged = write(msgspec.structs.replace(own, started_at=1), folder.parent / "forged")
    assert forged.file_name == record.file_name
    (folder / record.file_name).write_bytes((folder.parent / "forged" / forged.file_name).read_bytes())
    watch = Watch(folder, record)
    assert len(await watch.check()) == 4
    assert [each.identity for each in watch.neighbours.dead] != [own.identity]
    former.close()
    assert await watch.check() == []


async def test_files_that_are_not_records_are_ignored(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    real = dead_facts()
    name = write(real, folder).file_name
    valid = (folder / name).read_bytes()
    (folder / name).unlink()
    living = own_facts()
    named = parse_identity(living.identity)
    assert named is not None
    forgeries = [
        # The identity of a living process with the pid of another one.
        msgspec.structs.replace(living, pid=1, started_at=1),
        msgspec.structs.replace(living, pid=-1),
        msgspec.structs.replace(living, pid=0),
        msgspec.structs.replace(living, pid=2**40),
        msgspec.structs.replace(living, identity="unnamed", started_at=1),
        # A process of another boot, host or namespace may still run there.
        msgspec.structs.replace(dead_facts(), boot_id="another"),
        msgspec.structs.replace(dead_facts(), pid_namespace=3),
        msgspec.structs.replace(dead_facts(), time_namespace=3),
    ]
    for facts in forgeries:
        write(facts, folder)
    write(dead_facts(), folder, name=f"{os.getpid()}-{7:032x}")
    empty, garbage, huge, pipe, directory = (folder / f"17-{number:032x}" for number in range(5))
    empty.touch()
    garbage.write_bytes(os.urandom(len(valid)))
    huge.write_bytes(valid)
    os.truncate(huge, 2**40)
    (folder.parent / "outside").write_bytes(valid)
    (folder / name).symlink_to(folder.parent / "outside")
    os.mkfifo(pipe)
    directory.mkdir()
    watch = Watch(folder)
    assert await watch.check() == []
    (folder / name).unlink()
    (folder / name).write_bytes(valid)
    if os.geteuid() == 0:
        os.chown(folder / name, 12_345, -1)
        assert await watch.check() == []
        (folder / name).unlink()
        (folder / name).write_bytes(valid)
        assert set(await Watch(folder).check()) == {real.identity}
    assert "unexpected" not in caplog.text


async def test_records_of_ended_processes_are_removed_in_time(folder: Path, start: StartProgram) -> None:
    def age(record: ProcessRecord | str, seconds: float) -> None:
        name = record if isinstance(record, str) else record.file_name
        os.utime(folder / name, (time.time() - seconds,) * 2)

    ours, others, fresh = write(dead_facts(), folder), write(dead_facts("other"), folder), write(dead_facts(), folder)
    elsewhere = write(msgspec.structs.replace(dead_facts("other"), pid_namespace=3), folder)
    running = write(own_facts("other"), folder)
    garbage = f"17-{1:032x}"
    (folder / garbage).touch()
    (folder / "not-a-record").touch()
    age("not-a-record", 100 * 3_600)
    free, held = (f"isolation-0-{number:032x}" for number in range(2))
    for name in (free, held):
        (folder / name).touch()
    lock = os.open(folder / held, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    watch = Watch(folder)
    age(ours, 700)
    await watch.check()
    # It had leases.
    assert (folder / ours.file_name).exists()
    await watch.check()
    await watch.check()
    await watch.check()
    assert not (folder / ours.file_name).exists()
    assert len(watch.neighbours.dead) == 2
    await watch.check()
    assert len(watch.neighbours.dead) == 1
    for each in (others, elsewhere, running, garbage, free, held):
        age(each, 23 * 3_600)
    await Watch(folder).check()
    assert len(os.listdir(folder)) == 8
    for each in (others, elsewhere, running, garbage, fresh, free, held):
        age(each, 25 * 3_600)
    await Watch(folder).check()
    assert set(os.listdir(folder)) == {running.file_name, "not-a-record", held}
    os.close(lock)


async def test_an_unexpected_error_of_the_first_check_is_logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker makes that check before it claims: it must not end the worker."""
    write(dead_facts(), folder)
    watch = Watch(folder)

    async def refuse(worker: str, queues: Sequence[str]) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(watch.leases, "expire_leases", refuse)
    await watch.check()
    assert "failed unexpectedly" in caplog.text
    monkeypatch.undo()
    assert len(await watch.check()) > 0


async def test_a_running_process_touches_its_record(folder: Path) -> None:
    record = ProcessRecord.create(new_identity(), "store", ["default"], path=folder)
    assert record is not None
    os.utime(folder / record.file_name, (0, 0))
    await Watch(folder, record).check()
    assert time.time() - (folder / record.file_name).stat().st_mtime < 60


async def test_a_refused_directory_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkdir(folder)
    os.chmod(folder, 0o777)
    watch = Watch(folder)
    for _ in range(3):
        assert await watch.check() == []
    assert caplog.text.count("run chmod 700") == 1


def test_a_store_has_one_name_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert identify_store("sqlite:///a.db", "") == identify_store(f"sqlite:///{tmp_path}/a.db", "")
    one = identify_store("redis://app:secret@cache/0", "n")
    assert one == identify_store("redis://app:rotated@cache/0", "n")
    assert len({one, identify_store("redis://cache/0", "n"), identify_store("redis://cache/1", "n")}) == 3
    assert one != identify_store("redis://app:secret@cache/0", "m")
