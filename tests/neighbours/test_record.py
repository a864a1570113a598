"""The record of a process: what it has after any end of its process, and which directories are refused."""

from __future__ import annotations

import logging
import os
import stat
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.job import new_job_ids
from holdfast.identity import new_identity
from holdfast.neighbours.record import ProcessRecord, describe_process, parse_facts, parse_waiting
from tests.neighbours.conftest import RECORD, StartProgram, read


def make(folder: Path, **options: bool) -> ProcessRecord:
    record = ProcessRecord.create(new_identity("blue"), "store", ["default", "mail"], path=folder, **options)
    assert record is not None
    return record


def waiting(record: ProcessRecord, folder: Path, job_ids: list[str]) -> list[str]:
    """The jobs that have not started, by the record."""
    found = parse_waiting(read(record, folder))
    return [job_id for job_id in job_ids if not found.has_started(job_id)]


def test_a_record_identifies_its_process(folder: Path) -> None:
    record = make(folder, isolated=True)
    facts = parse_facts(read(record, folder))
    assert facts is not None
    assert (facts.store, facts.queues, facts.isolated, facts.pid) == ("store", ("default", "mail"), True, os.getpid())
    assert facts == describe_process(facts.identity, "store", ["default", "mail"], isolated=True)
    assert facts.file_name == record.file_name
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()] == [0o600]
    record.close()
    record.close()
    assert list(folder.iterdir()) == []


def test_waiting_jobs_start_in_their_order(folder: Path) -> None:
    record, ids = make(folder), new_job_ids(9)
    assert waiting(record, folder, ids) == []
    assert not record.add_waiting(ids[:2])
    record.set_waiting(ids[:4])
    assert waiting(record, folder, ids) == ids[:4]
    record.mark_started()
    record.mark_started()
    assert waiting(record, folder, ids) == ids[2:4]
    assert record.add_waiting(ids[4:6])
    assert waiting(record, folder, ids) == ids[2:6]
    record.set_waiting(ids[3:8])
    record.mark_started()
    assert waiting(record, folder, ids) == ids[4:8]
    # Released, and claimed again: it has been started before.
    assert record.add_waiting(ids[3:4])
    assert waiting(record, folder, ids) == ids[4:8]
    record.set_waiting([])
    assert waiting(record, folder, ids) == []
    record.mark_started()
    assert waiting(record, folder, ids) == []


def test_jobs_that_do_not_fit_count_as_started(folder: Path) -> None:
    record, ids = make(folder), [f"{'x' * 1_000}-{number}" for number in range(100)]
    record.set_waiting(ids)
    listed = waiting(record, folder, ids)
    assert 50 < len(listed) < 100
    assert listed == ids[: len(listed)]
    assert not record.add_waiting(ids[len(listed) :])
    for _ in ids:
        record.mark_started()
    assert waiting(record, folder, ids) == []
    for bad in (["a\0b", "c"], ["a", "\0"]):
        record.set_waiting(ids[:2])
        assert not record.add_waiting(bad)
        record.set_waiting(bad)
        assert waiting(record, folder, [*bad, "a", "b", "c", *ids]) == []


@given(st.lists(st.tuples(st.sampled_from(["add", "set", "start"]), st.integers(0, 600)), max_size=30))
@settings(max_examples=60, deadline=None, database=None)
def test_a_record_has_what_a_queue_has(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]) -> None:
    """Whatever is added, written again and started, by any number: the jobs that wait, or fewer."""
    folder = tmp_path_factory.mktemp("records") / "private"
    record, queue, number = make(folder), list[str](), 0
    for step, count in steps:
        if step == "start":
            for _ in range(min(count, len(queue))):
                record.mark_started()
                queue.pop(0)
            continue
        fresh = [f"{'job' * 10}-{number + each}" for each in range(count)]
        number += count
        queue = queue + fresh if step == "add" else fresh
        if step == "set" or not record.add_waiting(fresh):
            record.set_waiting(queue)
        if sum(len(job_id) + 1 for job_id in queue) < 65_536:
            assert waiting(record, folder, queue) == queue
    found = parse_waiting(read(record, folder))
    assert len(found) == len([job_id for job_id in queue if not found.has_started(job_id)])
    record.close()


#: Jobs start, and write their number to a pipe, while lists are extended and replaced.
_STARTS = (
    RECORD
    + """
waiting, number = [], 0
print("ready", flush=True)
while True:
    fresh = [f"job-{number + each}" for each in range(7)]
    number += len(fresh)
    waiting += fresh
    if not record.add_waiting(fresh):
        record.set_waiting(waiting)
    for _ in range(6):
        record.mark_started()
        os.write(1, waiting.pop(0).encode() + b"\\n")
    if number % 5 == 0:
        del waiting[0]
        record.set_waiting(waiting)
"""
)


def test_no_job_that_began_waits_in_the_record_of_a_killed_process(folder: Path, start: StartProgram) -> None:
    random = Random(7)
    for _ in range(4):
        process = start(_STARTS)
        time.sleep(random.uniform(0.01, 0.05))
        process.kill()
        begun, _ = process.communicate()
        (name,) = [path for path in folder.iterdir() if path.name.startswith(f"{process.pid}-")]
        found = parse_waiting(name.read_bytes())
        assert len(begun.split()) > 100
        assert [job_id for job_id in begun.split() if not found.has_started(job_id)] == []
        assert found.has_started("job-1")


# The directory ----------------------------------------------------------------------------------------


def test_a_directory_of_others_is_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def create() -> ProcessRecord | None:
        return ProcessRecord.create(new_identity(), "store", [], path=folder)

    caplog.set_level(logging.WARNING, "holdfast.neighbours")
    folder.mkdir(mode=0o755)
    assert create() is None
    assert f"run chmod 700 {folder}" in caplog.text
    folder.rmdir()
    folder.symlink_to(folder.parent)
    assert create() is None
    assert "make it a directory with mode 0700" in caplog.text
    folder.unlink()
    folder.touch()
    assert create() is None
    folder.unlink()
    assert create() is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_another_user_is_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 12_345, -1)
    assert ProcessRecord.create(new_identity(), "store", [], path=folder) is None
    assert "belongs to user 12345" in caplog.text
