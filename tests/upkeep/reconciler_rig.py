"""An engine, its feed, a lagging projector and a ledger, each in a few lines, with chance in every gap.

Every call that a reconciler makes may find the world changed: jobs are created, run, end and expire; the projector
reads, writes and trims in steps of their own; the engine is wiped, or falls back to an older memory. What the world
knows and nobody else does: whether a job's end is on its way.
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
class Memory:
    """What an engine knows, and what a wipe takes away."""

    jobs: dict[str, State] = field(default_factory=dict)
    ended_at: dict[str, int] = field(default_factory=dict)
    feed: list[FeedEntry] = field(default_factory=list)


@dataclass
class Projector:
    """Reads and writes in two steps; anything may happen between them."""

    old: FeedPosition | None = None
    batch: list[FeedEntry] = field(default_factory=list)


class World:
    """All of it, driven by one seed."""

    def __init__(self, seed: int, *, busy: bool = True) -> None:
        self.random = Random(seed)
        self.now_ms = 1_000_000
        self.busy = busy
        self.memory = Memory()
        self.older: Memory | None = None
        self.position = FeedPosition()
        self.written: set[tuple[str, str]] = set()
        self.stories: dict[str, list[Event]] = {}
        self.states: dict[str, State] = {}
        self.projectors = [Projector(), Projector()]
        #: Jobs that were restored although the ledger was about to learn, or had learnt, of their end.
        self.wrong: list[str] = []
        self.restores = 0
        self.count = 0

    # Chance ----------------------------------------------------------------------------------------

    def chance(self) -> None:
        """Some of what happens while a call is on its way."""
        for _ in range(self.random.randrange(4)):
            self.step()

    def step(self) -> None:
        steps = [self.create, self.move, self.move, self.project, self.project, self.trim, self.pass_time]
        if self.busy:
            steps += [self.move, self.create]
            if self.random.random() < 0.06:
                steps = [self.wipe, self.remember_this, self.fall_back]
        self.random.choice(steps)()

    def pass_time(self) -> None:
        self.now_ms += self.random.choice((1, 5, 20, 400)) if self.busy else 1
        for job_id, at in list(self.memory.ended_at.items()):
            if at + TTL_MS <= self.now_ms:
                del self.memory.ended_at[job_id], self.memory.jobs[job_id]

    # The engine ------------------------------------------------------------------------------------

    def create(self) -> None:
        if self.busy:
            self.count += 1
            self._move(f"job-{self.count}", None, State.QUEUED)

    def move(self) -> None:
        open_jobs = [job_id for job_id, state in self.memory.jobs.items() if state not in FINAL]
        if self.busy and open_jobs:
            job_id = self.random.choice(open_jobs)
            state = self.memory.jobs[job_id]
            # Not by way of dead letters: they are someone else's.
            ways = sorted(MOVES[state] - {State.DLQ_PENDING})
            target = self.random.choice([way for way in ways if way in (State.RUNNING, State.SUCCEEDED)] or ways)
            self._move(job_id, state, target)

    def wipe(self) -> None:
        self.memory = Memory()

    def remember_this(self) -> None:
        self.older = copy.deepcopy(self.memory)

    def fall_back(self) -> None:
        """A fail-over to a replica that was behind."""
        if self.older is not None:
            self.memory, self.older = self.older, None

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
        self.memory.jobs[job_id] = to_state
        if to_state in FINAL:
            self.memory.ended_at[job_id] = self.now_ms
        self._feed([event])

    def _feed(self, events: list[Event]) -> None:
        last = int(self.memory.feed[-1].position) if self.memory.feed else 0
        position = f"{max(self.now_ms, last + 1):015}"
        self.memory.feed.append(FeedEntry(position, f"{self.random.getrandbits(64):x}", events))

    # The projector ---------------------------------------------------------------------------------

    def project(self) -> None:
        projector = self.random.choice(self.projectors)
        if projector.old is None:
            self._read(projector)
        else:
            self._write(projector)

    def _read(self, projector: Projector) -> None:
        feed = self.memory.feed
        places = [(entry.position, entry.nonce) for entry in feed]
        here = (self.position.position, self.position.nonce)
        # Forked: from the start, without what is there already.
        found = feed[places.index(here) + 1 :] if here in places else feed
        projector.old, projector.batch = self.position, found[: self.random.randrange(1, 6)]
        if here not in places and not feed and self.position != FeedPosition():
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
        story, state = self.stories.setdefault(event.job_id, []), self.states.get(event.job_id)
        assert event.to_state is not None
        if state in FINAL or (event.from_state is None and state is not None):
            return
        if event.from_state != state and state is not None:
            forked = Event(type=FORKED_EVENT, job_id=event.job_id, at_ms=0, from_state=state, to_state=event.from_state)
            story.append(forked)
        if story or event.from_state is None:
            story.append(event)
            self.states[event.job_id] = event.to_state

    def trim(self) -> None:
        places = [(entry.position, entry.nonce) for entry in self.memory.feed]
        here = (self.position.position, self.position.nonce)
        if here in places:
            del self.memory.feed[: places.index(here)]

    # What nobody else knows --------------------------------------------------------------------------

    def end_is_known(self, job_id: str) -> bool:
        """The ledger has the job's end, or a feed entry that it has not read yet, or a batch that may be written."""
        if self.states.get(job_id) in FINAL:
            return True
        batches = [entry for each in self.projectors if each.old == self.position for entry in each.batch]
        return any(
            event.job_id == job_id and event.to_state in FINAL
            for entry in [*self.memory.feed, *batches]
            if (entry.position, entry.nonce) not in self.written
            for event in entry.events
        )

    def settle_down(self) -> None:
        """Nothing new happens, and the projector catches up."""
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
        return {
            job_id for job_id, state in self.states.items() if state not in FINAL and job_id not in self.memory.jobs
        }


class WorldEngine:
    """The part of an engine that a reconciler sees."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.options = EngineOptions(finished_ttl_ms=TTL_MS)

    async def queues(self) -> list[str]:
        return [QUEUE]

    async def for_each_queue(self, queues: Sequence[str], step: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return {queue: await step(queue) for queue in queues}, {}

    async def epoch(self, queue: str) -> str:
        return ""

    async def attach_reader(self, queue: str, epoch: str = "", *, keys_restored: bool = False) -> None:
        self._world.chance()

    async def restore_keys(self, queue: str, keys: Sequence[Any]) -> None:
        self._world.chance()

    async def read_feed(self, queue: str, start: str, limit: int) -> list[FeedEntry]:
        self._world.chance()
        return [entry for entry in self._world.memory.feed if entry.position >= start][:limit]

    async def snapshot(self, queue: str, job_ids: Sequence[str]) -> EngineSnapshot:
        self._world.chance()
        feed, jobs = self._world.memory.feed, self._world.memory.jobs
        unknown = [job_id for job_id in job_ids if job_id not in jobs]
        last = feed[-1] if feed else FeedEntry("", "", [])
        cut = EngineSnapshot(unknown, last.position, last.nonce, self._world.now_ms)
        self._world.chance()
        return cut

    async def restore(self, queue: str, cut: EngineSnapshot, jobs: Sequence[JobInfo]) -> list[bool]:
        world = self._world
        world.chance()
        places = [(entry.position, entry.nonce) for entry in world.memory.feed]
        same = (cut.position, cut.nonce) in places if cut.position else not places
        if not same:
            return [False] * len(jobs)
        answers = []
        for job in jobs:
            lost = job.job_id not in world.memory.jobs
            answers.append(lost)
            if lost:
                world.restores += 1
                if world.end_is_known(job.job_id):
                    world.wrong.append(job.job_id)
                to_state = State.QUEUED if job.state is State.RUNNING else job.state
                world._move(job.job_id, job.state, to_state, RESTORED_EVENT)
        world.chance()
        return answers


class WorldLedger:
    """The part of a ledger that a reconciler sees: projection and recovery at once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.projection = self
        self.recovery = self

    async def queues(self) -> list[str]:
        return [QUEUE]

    async def position(self, queue: str) -> FeedPosition:
        self._world.chance()
        return self._world.position

    async def wait_position_change(self, queue: str, than: FeedPosition, wait_ms: int) -> FeedPosition:
        for _ in range(20):
            if self._world.position != than:
                break
            self._world.step()
        else:
            self._world.now_ms += wait_ms
        return self._world.position

    async def already_written(self, queue: str, entries: Sequence[FeedEntry]) -> set[str]:
        self._world.chance()
        return {entry.position for entry in entries if (entry.position, entry.nonce) in self._world.written}

    async def open_jobs(self, queue: str, limit: int) -> AsyncIterator[list[OpenJob]]:
        page = [self._open(job_id) for job_id, state in self._world.states.items() if state not in FINAL]
        self._world.chance()
        for start in range(0, len(page), 7):
            yield page[start : start + 7]

    async def still_open(self, keys: Sequence[JobKey]) -> list[OpenJob]:
        self._world.chance()
        found = [self._open(key.job_id) for key in keys if self._world.states[key.job_id] not in FINAL]
        self._world.chance()
        return found

    async def histories(self, keys: Sequence[JobKey]) -> dict[JobKey, list[Event]]:
        self._world.chance()
        return {key: list(self._world.stories[key.job_id]) for key in keys}

    async def submission_keys(self, queue: str, window_ms: int, limit: int) -> AsyncIterator[list[Any]]:
        pages: list[list[Any]] = []
        for page in pages:
            yield page

    def _open(self, job_id: str) -> OpenJob:
        story = self._world.stories[job_id]
        return OpenJob(JobKey("default", QUEUE, job_id), self._world.states[job_id], len(story))
