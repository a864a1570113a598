"""A runner records which of its jobs have not started: none whose code may have begun is among them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.core.job import EMPTY_META, Claim, Lease
from holdfast.execution.backend import backend_of
from holdfast.identity import new_identity
from holdfast.neighbours.record import ProcessRecord, parse_waiting
from holdfast.worker.in_flight import InFlight, StopReason
from holdfast.worker.runner import Runner
from tests.worker.support import eventually
from tests.worker.test_runner import RecordingSettler


class Rig:
    """A runner for two jobs at a time; each runs until it is ended by name."""

    def __init__(self, folder: Path) -> None:
        record = ProcessRecord.create(new_identity(), "store", [], path=folder)
        assert record is not None
        self.record = record
        self.file = folder / record.file_name
        self.app = Holdfast("sqlite://")
        self.begun: list[str] = []
        #: Jobs whose code began while the record had them as not started.
        self.wrong: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        settler: Any = RecordingSettler()
        self.in_flight: InFlight = set()

        @self.app.task(name="work")
        async def work(name: str) -> None:
            if not self.has_started(name):
                self.wrong.append(name)
            self.begun.append(name)
            await self.ends.setdefault(name, asyncio.Event()).wait()

        @self.app.task(name="work_in_thread")
        def work_in_thread(name: str) -> None:
            if not self.has_started(name):
                self.wrong.append(name)
            self.begun.append(name)

        self.runner = Runner(backend_of(self.app).specs, settler, self.in_flight, 2, cancel_grace_s=0.05, record=record)

    def accept(self, *names: str, task: str = "work") -> None:
        claims = []
        for name in names:
            lease = Lease("default", name, "1-0", 1, "me")
            payload = f'{{"name":"{name}"}}'.encode()
            claims.append(Claim(lease, task, payload, "default", "", "", 1, 0, 1_000, EMPTY_META))
        self.runner.accept(claims)

    def lose(self, name: str) -> None:
        (run,) = [run for run in self.in_flight if run.claim.job_id == name]
        self.runner.stop(run, StopReason.LOST)

    async def end(self, name: str, then: str) -> None:
        """End a job, and wait until the next one has begun."""
        self.ends[name].set()
        await eventually(lambda: then in self.begun)

    def has_started(self, name: str) -> bool:
        return parse_waiting(self.file.read_bytes()).has_started(name)

    def unstarted(self) -> list[str]:
        return [name for name in "abcdefgh" if not self.has_started(name)]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path / "records")
    yield made
    made.runner.stop_all(StopReason.LOST)
    await eventually(lambda: made.runner.running == 0)
    await made.runner.close()
    made.record.close()


async def test_only_jobs_that_wait_have_not_started(rig: Rig) -> None:
    rig.accept("a", "b")
    assert rig.unstarted() == []
    rig.accept("c", "d", "e")
    assert rig.unstarted() == ["c", "d", "e"]
    await eventually(lambda: len(rig.begun) == 2)
    await rig.end("a", then="c")
    assert rig.unstarted() == ["d", "e"]
    rig.accept("f", "g")
    assert rig.unstarted() == ["d", "e", "f", "g"]
    rig.lose("e")
    await rig.end("b", then="d")
    await rig.end("c", then="f")
    assert rig.unstarted() == ["g"]
    rig.runner.set_concurrency(3)
    assert rig.unstarted() == []
    assert rig.wrong == []


async def test_a_job_is_recorded_before_its_thread_starts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    # As fast as a thread can be.
    monkeypatch.setattr(rig.runner._threads, "start", lambda work: work())
    rig.accept("a", "b")
    rig.accept("c", task="work_in_thread")
    assert rig.unstarted() == ["c"]
    await eventually(lambda: len(rig.begun) == 2)
    await rig.end("a", then="c")
    assert rig.wrong == []


async def test_a_released_job_that_is_claimed_again_has_started(rig: Rig) -> None:
    rig.accept("a", "b", "c", "d")
    assert rig.runner.release_queued("the worker is busy") == 2
    assert rig.unstarted() == []
    await eventually(lambda: len(rig.begun) == 2)
    rig.ends["a"].set()
    await eventually(lambda: rig.runner.running == 1)
    rig.accept("c", "e")
    await eventually(lambda: "c" in rig.begun)
    assert (rig.unstarted(), rig.wrong) == (["e"], [])


async def test_a_job_whose_former_run_still_executes_has_started(rig: Rig) -> None:
    rig.accept("a", "b", "c")
    await eventually(lambda: len(rig.begun) == 2)
    # Detached until its code has ended: its slot is taken.
    rig.lose("a")
    rig.accept("a", "d")
    assert rig.unstarted() == ["c", "d"]
