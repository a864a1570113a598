"""Records in a directory of the test, and processes for them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.neighbours.directory import open_directory
from holdfast.neighbours.record import ProcessFacts, ProcessRecord, read_record

StartProgram = Callable[..., "subprocess.Popen[str]"]

#: The start of a program that writes the record of its process.
RECORD: str = """
import os, sys, time
from pathlib import Path
from holdfast.identity import new_identity
from holdfast.neighbours.record import ProcessRecord
record = ProcessRecord.create(new_identity(), sys.argv[2], ["default", "mail"], path=Path(sys.argv[1]))
"""
WAIT: str = """
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "records"


@pytest.fixture
def start(folder: Path) -> Iterator[StartProgram]:
    """Start a program with a record; returns when it has printed a line."""
    started: list[subprocess.Popen[str]] = []

    def run(program: str = RECORD + WAIT, store: str = "store") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, str(folder), store]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def read(record: ProcessRecord, folder: Path) -> bytes:
    """The content of a record."""
    directory = open_directory(folder)
    return read_record(record.file_name, directory)


def write(facts: ProcessFacts, folder: Path, name: str | None = None) -> ProcessRecord:
    """Write a record with any facts."""
    record = ProcessRecord(facts, open_directory(folder))
    if name is not None:
        (folder / record.file_name).rename(folder / name)
    return record
