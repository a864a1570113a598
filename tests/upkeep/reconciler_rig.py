"""A simulation of an engine, its feed, a lagging projector and a ledger, driven by a seed.

Between any two calls of a reconciler, random steps run: jobs are created, run, end and expire; the projector
reads, writes and trims in separate steps; the engine is wiped or falls back to older data. Only the simulation
knows whether the final event of a job has yet to reach the ledger.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from holdfast.core.job import Event, JobInfo, JobKey
from holdfast.core.states import FINAL, FORKED_EVENT, MOVES, RESTORED_EVENT, State, event_for
from holdfast.engine.port.feed import EngineSnapshot, FeedEntry
from holdfast.engine.port.jobs import EngineOptions
from holdfast.ledger.port.ledger import FeedPosition, OpenJob

QUEUE: Final = "default"
TTL_MS: Final = 1_000


@dataclass
class EngineData:
    """The engine's data; a wipe removes all of it."""

    jobs: dict[str, State] = field(default_factory=dict)
    ended_at: dict[str, int] = field(default_factory=dict)
    feed: list[FeedEntry] = field(default_factory=list)


@dataclass
class Projector:
    """A projector that reads and writes in two steps; other steps may run in between."""

    old: FeedPosition | None = None
    batch: list[FeedEntry] = field(default_factory=list)


class Simulation:
    """The simulation, driven by one seed."""

    def __init__(self, seed: int, *, busy: bool = True) -> None:
        self.random = Random(seed)
        self.now_ms = 1_000_000
        self.busy = busy
        self.data = EngineData()
        self.replica: EngineData | None = None
        self.position = FeedPosition()
        self.written: set[tuple[str, str]] = set()
        self.histories: dict[str, list[Event]] = {}
        self.states: dict[str, State] = {}
        self.projectors = [Projector(), Projector()]
        #: Jobs that were restored although the ledger had, or was about to get, their final event.
        self.wrong: list[str] = []
        self.restores = 0
        self.count = 0

    # Random steps ----------------------------------------------------------------------------------

    def run_random_steps(self) -> None:
        """Run up to three random steps, as if during a call."""
        for _ in range(self.random.randrange(4)):
            self.step()

    def step(self) -> None:
        steps = [self.create, self.move, self.move, self.project, self.project, self.trim, self.pass_time]
        if self.busy:
            steps += [self.move, self.create]
            if self.random.random() < 0.06:
                steps = [self.wipe, self.save_replica, self.fall_back]
        self.random.choice(steps)()

    def pass_time(self) -> None:
        self.now_ms += self.random.choice((1, 5, 20, 400)) if self.busy else 1
        for job_id, at in list(self.data.ended_at.items()):
            if at + TTL_MS <= self.now_ms:
                del self.data.ended_at[job_id], self.data.jobs[job_id]

    # The engine ------------------------------------------------------------------------------------

    def create(self) -> None:
        if self.busy:
            self.count += 1
            self._move(f"job-{self.count}", None, State.QUEUED)

    def move(self) -> None:
        open_jobs = [job_id for job_id, state in self.data.jobs.items() if state not in FINAL]
        if self.busy and open_jobs:
            job_id = self.random.choice(open_jobs)
            state = self.data.jobs[job_id]
            # Without dead letters, which the reconciler does not confirm.
            targets = sorted(MOVES[state] - {State.DLQ_PENDING})
            target = self.random.choice(
                [candidate for candidate in targets if candidate in (State.RUNNING, State.SUCCEEDED)] or targets
            )
            self._move(job_id, state, target)

    def wipe(self) -> None:
        self.data = EngineData()

    def save_replica(self) -> None:
        self.replica = copy.deepcopy(self.data)

    def fall_back(self) -> None:
        """Fail over to a replica that was behind."""
        if self.replica is not None:
            self.data, self.replica = self.replica, None

    def _move(self, job_id: str, from_state: State | None, to_state: State, name: str = "") -> None:
        data: dict[str, Any] | None = None
        if from_state is None:
            data = {"task": "t", "payload": "{}", "idempotency_key": job_id}
        event = Event(
            type=name or event_for(from_state, to_state),
            job_id=job_id,
            at_ms=self.now_ms,
            from_state=from_state,
            to_state=to_state,
            data=data,
        )
        self.data.jobs[job_id] = to_state
        if to_state in FINAL:
            self.data.ended_at[job_id] = self.now_ms
        self._feed([event])

    def _feed(self, events: list[Event]) -> None:
        last = int(self.data.feed[-1].position) if self.data.feed else 0
        position = f"{max(self.now_ms, last + 1):015}"
        self.data.feed.append(FeedEntry(position, f"{self.random.getrandbits(64):x}", events))

    # The projector ---------------------------------------------------------------------------------

    def project(self) -> None:
        projector = self.random.choice(self.projectors)
        if projector.old is None:
            self._read(projector)
        else:
            self._write(projector)

    def _read(self, projector: Projector) -> None:
        feed = self.data.feed
        positions = [(entry.position, entry.nonce) for entry in feed]
        cursor = (self.position.position, self.position.nonce)
        # After a fork, the feed is read from its start.
        found = feed[positions.index(cursor) + 1 :] if cursor in positions else feed
        projector.old, projector.batch = self.position, found[: self.random.randrange(1, 6)]
        if cursor not in positions and not feed and self.position != FeedPosition():
            projector.batch = [FeedEntry("", "", [])]
        elif not projector.batch:
            projector.old = None

    def _write(self, projector: Projector) -> None:
        old, batch = projector.old, projector.batch
        projector.old, projector.batch = None, []
        if old != self.position or self.random.random() < 0.1:
            return
        for entry in batch:
            if (entry.position, entry.nonce) not in self.written and entry.position:
                self.written.add((entry.position, entry.nonce))
                for event in entry.events:
                    self._record(event)
            self.position = FeedPosition(entry.position, entry.nonce)

    def _record(self, event: Event) -> None:
        history, state = self.histories.setdefault(event.job_id, []), self.states.get(event.job_id)
        assert event.to_state is not None
        if state in FINAL or (event.from_state is None and state is not None):
            return
        if event.from_state != state and state is not None:
            forked = Event(type=FORKED_EVENT, job_id=event.job_id, at_ms=0, from_state=state, to_state=event.from_state)
            history.append(forked)
        if history or event.from_state is None:
            history.append(event)
            self.states[event.job_id] = event.to_state

    def trim(self) -> None:
        positions = [(entry.position, entry.nonce) for entry in self.data.feed]
        cursor = (self.position.position, self.position.nonce)
        if cursor in positions:
            del self.data.feed[: positions.index(cursor)]

    # Checks ------------------------------------------------------------------------------------------

    def end_is_known(self, job_id: str) -> bool:
        """Whether the job's final event is in the ledger, in the unread feed, or in a batch that may be written."""
        if self.states.get(job_id) in FINAL:
            return True
        batches = [entry for each in self.projectors if each.old == self.position for entry in each.batch]
        return any(
            event.job_id == job_id and event.to_state in FINAL
            for entry in [*self.data.feed, *batches]
            if (entry.position, entry.nonce) not in self.written
            for event in entry.events
        )

    def settle_down(self) -> None:
        """Stop all changes and let the projector catch up."""
        self.busy = False
        for _ in range(3):
            for projector in self.projectors:
                projector.old = None
            while True:
                self._read(self.projectors[0])
                if self.projectors[0].old is None:
                    break
                self._write(self.projectors[0])

    def lost(self) -> set[str]:
        return {job_id for job_id, state in self.states.items() if state not in FINAL and job_id not in self.data.jobs}


class SimulatedEngine:
    """The engine methods that a reconciler calls."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.options = EngineOptions(finished_ttl_ms=TTL_MS)

    async def queues(self) -> list[str]:
        return [QUEUE]

    async def for_each_queue(
        self, queues: Sequence[str], step: Any, *, together: int = 1
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        return {queue: await step(queue) for queue in queues}, {}

    async def epoch(self, queue: str) -> str:
        return ""

    async def attach_reader(self, queue: str, epoch: str = "", *, keys_restored: bool = False) -> None:
        self._simulation.run_random_steps()

    async def restore_keys(self, queue: str, keys: Sequence[Any]) -> None:
        self._simulation.run_random_steps()

    async def read_feed(self, queue: str, start: str, limit: int) -> list[FeedEntry]:
        self._simulation.run_random_steps()
        return [entry for entry in self._simulation.data.feed if entry.position >= start][:limit]

    async def snapshot(self, queue: str, job_ids: Sequence[str]) -> EngineSnapshot:
        self._simulation.run_random_steps()
        feed, jobs = self._simulation.data.feed, self._simulation.data.jobs
        unknown = [job_id for job_id in job_ids if job_id not in jobs]
        last = feed[-1] if feed else FeedEntry("", "", [])
        snapshot = EngineSnapshot(unknown, last.position, last.nonce, self._simulation.now_ms)
        self._simulation.run_random_steps()
        return snapshot

    async def restore(self, queue: str, snapshot: EngineSnapshot, jobs: Sequence[JobInfo]) -> list[bool]:
        simulation = self._simulation
        simulation.run_random_steps()
        positions = [(entry.position, entry.nonce) for entry in simulation.data.feed]
        same = (snapshot.position, snapshot.nonce) in positions if snapshot.position else not positions
        if not same:
            return [False] * len(jobs)
        answers = []
        for job in jobs:
            lost = job.job_id not in simulation.data.jobs
            answers.append(lost)
            if lost:
                simulation.restores += 1
                if simulation.end_is_known(job.job_id):
                    simulation.wrong.append(job.job_id)
                to_state = State.QUEUED if job.state is State.RUNNING else job.state
                simulation._move(job.job_id, job.state, to_state, RESTORED_EVENT)
        simulation.run_random_steps()
        return answers


class SimulatedLedger:
    """The ledger methods that a reconciler calls; projection and recovery in one."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.projection = self
        self.recovery = self

    async def queues(self) -> list[str]:
        return [QUEUE]

    async def position(self, queue: str) -> FeedPosition:
        self._simulation.run_random_steps()
        return self._simulation.position

    async def wait_position_change(self, queue: str, position: FeedPosition, wait_ms: int) -> FeedPosition:
        for _ in range(20):
            if self._simulation.position != position:
                break
            self._simulation.step()
        else:
            self._simulation.now_ms += wait_ms
        return self._simulation.position

    async def already_written(self, queue: str, entries: Sequence[FeedEntry]) -> set[str]:
        self._simulation.run_random_steps()
        return {entry.position for entry in entries if (entry.position, entry.nonce) in self._simulation.written}

    async def open_jobs(self, queue: str, limit: int) -> AsyncIterator[list[OpenJob]]:
        page = [self._open(job_id) for job_id, state in self._simulation.states.items() if state not in FINAL]
        self._simulation.run_random_steps()
        for start in range(0, len(page), 7):
            yield page[start : start + 7]

    async def still_open(self, keys: Sequence[JobKey]) -> list[OpenJob]:
        self._simulation.run_random_steps()
        found = [self._open(key.job_id) for key in keys if self._simulation.states[key.job_id] not in FINAL]
        self._simulation.run_random_steps()
        return found

    async def histories(self, keys: Sequence[JobKey]) -> dict[JobKey, list[Event]]:
        self._simulation.run_random_steps()
        return {key: list(self._simulation.histories[key.job_id]) for key in keys}

    async def submission_keys(self, queue: str, window_ms: int, limit: int) -> AsyncIterator[list[Any]]:
        pages: list[list[Any]] = []
        for page in pages:
            yield page

    def _open(self, job_id: str) -> OpenJob:
        history = self._simulation.histories[job_id]
        return OpenJob(JobKey("default", QUEUE, job_id), self._simulation.states[job_id], len(history))
