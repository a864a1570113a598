"""What users and processes do, step by step. Together the stories use every verb of engine and ledger.

A step may be taken twice: whoever is told that a store does not answer asks again, and whoever was in the middle of a
step when the process died takes it once more in the next one. What the world outside has seen is in `World`, which
outlives every process.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final

from holdfast import AskPeople, Context, Fatal, Holdfast, Job, Retry
from holdfast.brokers.memory import MemoryBroker
from holdfast.core.job import Claim, Envelope, Failure, new_job_ids
from holdfast.core.person import ALL_TENANTS, Person, Role
from holdfast.core.states import State
from holdfast.core.verdict import Answer, Release, RetryLater, Settlement, Succeed
from holdfast.effects import Done, NotDone
from holdfast.engine.port import Control
from holdfast.errors import Conflict, ControlChanged, TransitionInvalid, Unavailable
from holdfast.ledger.letters import LetterFilter
from holdfast.ledger.outbox_store import Status
from holdfast.ledger.people import ApprovalStatus, LetterStatus
from holdfast.outbox.writing import Event
from holdfast.upkeep.relaying import Relaying
from tests.chaos.crashing import outside
from tests.chaos.places import Place
from tests.chaos.process import Process, again

_EVERYTHING: Final = frozenset({ALL_TENANTS})
ANN: Final = Person(name="ann", role=Role.ADMIN, tenants=_EVERYTHING)
BOB: Final = Person(name="bob", role=Role.ADMIN, tenants=_EVERYTHING)
QUEUE: Final = "default"
_BROKER: Final = "crash-points"


class World:
    """What is outside of all processes: what callers were told, and what has happened to others."""

    def __init__(self) -> None:
        #: Jobs that somebody was told are accepted, by the caller's key.
        self.accepted: dict[str, str] = {}
        #: How often each effect has happened.
        self.acted: Counter[str] = Counter()
        #: Whatever else a story has to remember.
        self.notes: dict[str, Any] = {}
        #: How many steps are done.
        self.step = 0

    def accept(self, key: str, job_id: str) -> None:
        """Somebody was told so; and the same key is always the same job."""
        assert self.accepted.setdefault(key, job_id) == job_id, f"key {key} was given two jobs"

    def act(self, key: str) -> str:
        """Something that cannot be taken back."""
        self.acted[key] += 1
        return f"did {key}"


Step = Callable[[Process, World], Awaitable[None]]


class Story:
    """Tasks, steps, and what must hold at the end beside what holds for all stories."""

    name: str
    settings: dict[str, Any] = {}  # noqa: RUF012 - never changed
    forks = False

    def suits(self, place: Place) -> bool:
        return place.has_ledger

    def tasks(self, app: Holdfast, world: World) -> None:
        """Register them."""

    def steps(self) -> Sequence[Step]:
        """In order."""
        raise NotImplementedError

    async def attend(self, process: Process, world: World) -> None:
        """What people still do while everything comes to its end."""

    async def check(self, process: Process, world: World) -> None:
        """Raise `AssertionError`."""


async def hand_in(process: Process, world: World, task: str, key: str, **options: Any) -> None:
    """As a caller does who wants it done: again, with the same key, until told that it is accepted."""
    submit = process.app.tasks[task].options(idempotency_key=key, **options).submit
    job: Job[Any] = await again(submit)
    world.accept(key, job.id)


async def work(process: Process, world: World) -> None:
    await process.work()


async def keep(process: Process, world: World) -> None:
    await process.keep()


async def later(process: Process, world: World) -> None:
    """Longer than a lease and any retry."""
    await process.place.advance(31_000)


async def state_of(process: Process, world: World, key: str) -> State:
    (view,) = await again(lambda: process.engine.get(QUEUE, [world.accepted[key]]))
    assert view is not None, f"the accepted job {key} is not there"
    state: State = view.state
    return state


# A job's life --------------------------------------------------------------------------------------


class Life(Story):
    """Submitted under a key, fails once, is retried, and ends; a second caller with the same key gets the same job."""

    name = "life"

    def suits(self, place: Place) -> bool:
        return True

    def tasks(self, app: Holdfast, world: World) -> None:
        @app.task(retry=Retry(max_retries=20, base=1.0))
        async def order(ctx: Context) -> str:
            if ctx.attempt == 1:
                raise ValueError("the first time it fails")
            return "done"

    async def submit(self, process: Process, world: World) -> None:
        await hand_in(process, world, "order", "one")

    async def repeat(self, process: Process, world: World) -> None:
        await hand_in(process, world, "order", "one")

    def steps(self) -> Sequence[Step]:
        return (self.submit, work, keep, self.repeat, later, keep, work, keep, self.repeat)

    async def check(self, process: Process, world: World) -> None:
        assert await state_of(process, world, "one") is State.SUCCEEDED


class Acting(Story):
    """A step and two effects: one whose doubt is settled by asking the world, one that waits for a person."""

    name = "effects"

    def tasks(self, app: Holdfast, world: World) -> None:
        def asked(key: str) -> Any:
            return Done("did asked") if world.acted["asked"] else NotDone()

        async def do(key: str) -> str:
            return world.act(key)

        async def draft() -> str:
            return "draft"

        @app.task(retry=Retry(max_retries=20, base=1.0))
        async def publish(ctx: Context) -> str:
            await ctx.step("draft", draft)
            await ctx.effect.options(in_doubt=asked)("asked", do, "asked")
            if ctx.attempt == 1:
                raise ValueError("after the first effect")
            return await ctx.effect("once", do, "once")

    async def submit(self, process: Process, world: World) -> None:
        await hand_in(process, world, "publish", "one")

    def steps(self) -> Sequence[Step]:
        return (self.submit, work, keep, later, keep, work, keep)

    async def attend(self, process: Process, world: World) -> None:
        if await state_of(process, world, "one") is State.SUSPENDED:
            # In doubt. A person gives it up.
            with suppress(TransitionInvalid):
                await again(lambda: process.offices.operating.discard(ANN, world.accepted["one"], reason="in doubt"))

    async def check(self, process: Process, world: World) -> None:
        assert world.acted["asked"] == 1
        if await state_of(process, world, "one") is State.SUCCEEDED:
            assert world.acted["once"] == 1


# People --------------------------------------------------------------------------------------------


class Letters(Story):
    """Two jobs die. One letter is replayed, the other thrown away by two people."""

    name = "letters"

    def tasks(self, app: Holdfast, world: World) -> None:
        @app.task(name="die")
        async def die(ctx: Context, which: str) -> str:
            if which in world.accepted and world.accepted[which] == ctx.job_id:
                raise Fatal("dies")
            return "replayed"

    async def submit(self, process: Process, world: World) -> None:
        for which in ("replayed", "discarded"):
            submit = process.app.tasks["die"].options(idempotency_key=which).submit
            job = await again(partial(submit, which))
            world.accept(which, job.id)

    async def _letter(self, process: Process, world: World, key: str) -> Any:
        """Once the ledger has it."""
        for _ in range(20):
            rows = (await again(lambda: process.offices.letters.list(ANN, LetterFilter()))).letters
            for row in rows:
                if row.job_id == world.accepted[key]:
                    return row
            await process.work()
            await process.project()
        raise AssertionError(f"the dead letter of {key} is not there")

    async def replay(self, process: Process, world: World) -> None:
        """Until it is seen to be replayed: a mark is enough, whoever is told that the engine is away has left one."""
        while not (letter := await self._letter(process, world, "replayed")).replay_count:
            with suppress(Conflict, Unavailable):
                await process.offices.letters.replay(ANN, letter.dlq_id, reason="mended", expected=0)

    async def discard(self, process: Process, world: World) -> None:
        letter = await self._letter(process, world, "discarded")
        if letter.status is LetterStatus.OPEN:
            with suppress(Conflict):
                await again(lambda: process.offices.letters.discard(ANN, letter.dlq_id, "of no use"))

    async def confirm(self, process: Process, world: World) -> None:
        letter = await self._letter(process, world, "discarded")
        if letter.status is not LetterStatus.DISCARDED:
            with suppress(Conflict):
                await again(lambda: process.offices.letters.confirm(BOB, letter.dlq_id))

    def steps(self) -> Sequence[Step]:
        return (self.submit, work, work, keep, keep, self.replay, self.discard, self.confirm, work, keep)

    async def check(self, process: Process, world: World) -> None:
        for which in ("replayed", "discarded"):
            assert await state_of(process, world, which) is State.FAILED
        replayed = await self._letter(process, world, "replayed")
        assert replayed.replay_count == 1, replayed
        assert (await self._letter(process, world, "discarded")).status is LetterStatus.DISCARDED
        jobs = await process.ledger.queries.jobs(_all_jobs(), 50, None)
        assert sorted(job.state for job in jobs.jobs) == [State.FAILED, State.FAILED, State.SUCCEEDED]


class Deciding(Story):
    """One job needs a yes, one gets a no, one is suspended and resumed, one is cancelled."""

    name = "people"

    def tasks(self, app: Holdfast, world: World) -> None:
        app.guard.rule("risky", task="risky", then=AskPeople("it is risky"))

        @app.task(name="risky")
        async def risky() -> str:
            return world.act("risky")

        @app.task(name="plain")
        async def plain() -> str:
            return "done"

    async def submit(self, process: Process, world: World) -> None:
        await hand_in(process, world, "risky", "yes")
        await hand_in(process, world, "risky", "no")
        for key in ("aside", "away"):
            await hand_in(process, world, "plain", key, delay=3)

    async def vote(self, process: Process, world: World) -> None:
        rows = (await again(lambda: process.offices.approvals.list(BOB))).approvals
        for row in rows:
            if row.status is ApprovalStatus.REQUESTED:
                approve = row.job_id == world.accepted["yes"]
                with suppress(Conflict):
                    vote = partial(process.offices.approvals.vote, BOB, row.approval_id)
                    await again(partial(vote, approve=approve, reason="seen"))

    async def attend(self, process: Process, world: World) -> None:
        # Who has not seen the question yet answers when it is there.
        await self.vote(process, world)

    async def suspend(self, process: Process, world: World) -> None:
        with suppress(TransitionInvalid):
            await again(lambda: process.offices.operating.suspend(ANN, world.accepted["aside"], reason="wait"))
        assert await state_of(process, world, "aside") is State.SUSPENDED

    async def cancel(self, process: Process, world: World) -> None:
        with suppress(TransitionInvalid):
            await again(lambda: process.offices.operating.cancel(ANN, world.accepted["away"], reason="no"))
        assert await state_of(process, world, "away") is State.CANCELLED

    async def resume(self, process: Process, world: World) -> None:
        with suppress(TransitionInvalid):
            await again(lambda: process.offices.operating.resume(ANN, world.accepted["aside"], reason="go on"))
        assert await state_of(process, world, "aside") is not State.SUSPENDED

    def steps(self) -> Sequence[Step]:
        return (
            self.submit,
            keep,
            self.vote,
            self.suspend,
            self.cancel,
            keep,
            work,
            self.resume,
            later,
            keep,
            work,
            keep,
        )

    async def check(self, process: Process, world: World) -> None:
        ends = {key: await state_of(process, world, key) for key in world.accepted}
        assert ends == {
            "yes": State.SUCCEEDED,
            "no": State.CANCELLED,
            "aside": State.SUCCEEDED,
            "away": State.CANCELLED,
        }
        # Effects are once-only, tasks are at least once.
        assert world.acted["risky"] >= 1


# The engine's verbs --------------------------------------------------------------------------------


class Verbs(Story):
    """Every verb of the engine's port by hand, asked again with the same arguments when it does not answer."""

    name = "verbs"
    keys = ("now", "delayed", "taken", "urgent", "lost")

    def suits(self, place: Place) -> bool:
        return True

    def tasks(self, app: Holdfast, world: World) -> None:
        @app.task(name="plain")
        async def plain() -> str:
            return "done"

    async def submit(self, process: Process, world: World) -> None:
        ids = world.notes.setdefault("ids", new_job_ids(len(self.keys)))
        now_ms = await again(process.engine.now_ms)
        due = world.notes.setdefault("due", now_ms + 20_000)
        envelopes = [
            Envelope(
                job_id=job_id,
                task="plain",
                payload=b"{}",
                idempotency_key=key,
                run_at_ms=due if key in ("delayed", "taken", "urgent") else 0,
            )
            for key, job_id in zip(self.keys, ids, strict=True)
        ]
        desk = await again(process.app.desk)
        for key, receipt in zip(self.keys, await again(lambda: desk.submit_many(envelopes)), strict=True):
            world.accept(key, receipt.job_id)

    async def take(self, process: Process, world: World) -> None:
        job_id = world.accepted["taken"]
        try:
            claims = [await process.engine.take(process.name, QUEUE, job_id)]
        except TransitionInvalid:
            claims = []
        except Unavailable:
            claims = await again(lambda: process.engine.resume(process.name, [QUEUE], ()))
        await self._renew_and_settle(process, claims)

    async def hold(self, process: Process, world: World) -> None:
        """Claim one job, and die of old age with it, as far as the engine knows."""
        with suppress(Unavailable):
            world.notes["late"] = await process.engine.claim("lost-worker", [QUEUE], 1, 0)

    async def reclaim(self, process: Process, world: World) -> None:
        claims = await self._claims(process, lambda: process.engine.reclaim(process.name, [QUEUE], 10))
        release = [Settlement(claim, Release("given back"), claim.claimed_at_ms) for claim in claims]
        if release:
            await again(lambda: process.engine.settle(release))

    async def late(self, process: Process, world: World) -> None:
        """The lost worker wakes up, and has an end for a job that is not its own any more."""
        late = [Settlement(claim, Succeed(b"late"), claim.claimed_at_ms) for claim in world.notes.get("late", ())]
        if late:
            answers = await again(lambda: process.engine.settle(late))
            assert set(answers) == {Answer.STALE}, f"a lost lease has settled: {answers}"

    async def expedite(self, process: Process, world: World) -> None:
        with suppress(TransitionInvalid):
            await again(lambda: process.engine.expedite(QUEUE, world.accepted["urgent"], actor="ann", reason="now"))

    async def claim(self, process: Process, world: World) -> None:
        claims = await self._claims(process, lambda: process.engine.claim(process.name, [QUEUE], 1, 0))
        failure = Failure("TASK_ERROR", "boom", "ValueError", "")
        settlements = [Settlement(claim, RetryLater(1_000, failure), claim.claimed_at_ms) for claim in claims]
        if settlements:
            answers = await again(lambda: process.engine.settle(settlements))
            assert Answer.STALE not in answers, answers

    async def control(self, process: Process, world: World) -> None:
        paused = Control(paused=True)
        for before, after in ((None, paused), (paused, Control())):
            with suppress(ControlChanged):
                await again(partial(process.engine.set_control, QUEUE, after, expected=before))
        assert (await again(lambda: process.engine.control(QUEUE))) == Control()

    async def look(self, process: Process, world: World) -> None:
        engine = process.engine
        await again(lambda: engine.stats(QUEUE))
        await again(lambda: engine.workers([QUEUE]))
        await again(lambda: engine.find(QUEUE, [State.QUEUED, State.RETRYING], 10))
        await again(lambda: engine.wait_final(QUEUE, world.accepted["now"], 0))
        await again(lambda: engine.survey(QUEUE, list(world.accepted.values())))
        await again(lambda: engine.feed(QUEUE, "", 10))

    async def leave(self, process: Process, world: World) -> None:
        await again(lambda: process.engine.leave("lost-worker", [QUEUE]))

    async def _claims(self, process: Process, call: Callable[[], Awaitable[list[Claim]]]) -> list[Claim]:
        """As a worker gets them: after a lost reply, first by asking for what it holds."""
        while True:
            try:
                return await call()
            except Unavailable:
                held: list[Claim] = await again(lambda: process.engine.resume(process.name, [QUEUE], ()))
                if held:
                    return held

    async def _renew_and_settle(self, process: Process, claims: list[Claim]) -> None:
        if not claims:
            return
        leases = [claim.lease for claim in claims]
        lost = await again(lambda: process.engine.renew(leases, {lease.token for lease in leases}))
        assert not lost
        settlements = [Settlement(claim, Succeed(b"1"), claim.claimed_at_ms) for claim in claims]
        answers = await again(lambda: process.engine.settle(settlements))
        assert Answer.STALE not in answers, answers

    def steps(self) -> Sequence[Step]:
        return (
            self.submit,
            self.take,
            self.expedite,
            keep,
            self.hold,
            self.look,
            self.claim,
            later,
            self.reclaim,
            self.late,
            self.control,
            keep,
            self.leave,
            work,
        )


# The ledger ----------------------------------------------------------------------------------------


class Durable(Story):
    """Submitted durably; then the engine loses everything, and is given it back by the ledger."""

    name = "wipe"
    forks = True

    def suits(self, place: Place) -> bool:
        return place.apart

    def tasks(self, app: Holdfast, world: World) -> None:
        @app.task(name="plain", retry=Retry(max_retries=20, base=1.0))
        async def plain(ctx: Context) -> str:
            return "done"

    async def submit(self, process: Process, world: World) -> None:
        for key, delay in (("line", 0), ("delayed", 3)):
            desk_call = asyncio.create_task(
                hand_in(process, world, "plain", key, durable=True, delay=timedelta(seconds=delay))
            )
            while not desk_call.done():
                await process.project()
                await asyncio.sleep(0)
            await desk_call

    async def wipe(self, process: Process, world: World) -> None:
        if not world.notes.get("wiped"):
            await process.place.wipe()
            world.notes["wiped"] = True

    async def reconcile(self, process: Process, world: World) -> None:
        await process.project()
        await process.reconcile()

    async def repeat(self, process: Process, world: World) -> None:
        await hand_in(process, world, "plain", "line")

    def steps(self) -> Sequence[Step]:
        return (self.submit, self.wipe, self.repeat, self.reconcile, work, keep, later, keep, work, keep)

    async def attend(self, process: Process, world: World) -> None:
        await process.reconcile()

    async def check(self, process: Process, world: World) -> None:
        for key in world.accepted:
            assert await state_of(process, world, key) is State.SUCCEEDED


class Publishing(Story):
    """In the user's own transaction: an event for a broker, and a job. A relay brings both to where they belong."""

    name = "outbox"

    def __init__(self) -> None:
        target = {"type": "memory", "connection": {"name": _BROKER}}
        self.settings = {"outbox_targets": {"default": target}, "outbox_lease_s": 1, "outbox_backoff_base_s": 0.01}

    def tasks(self, app: Holdfast, world: World) -> None:
        @app.task(name="plain")
        async def plain() -> str:
            return world.act("plain")

    async def write(self, process: Process, world: World) -> None:
        """The user's own statement of what was committed, and so not ours to fail."""
        if not world.notes.get("written"):
            MemoryBroker.forget(_BROKER)
            async with users_transaction(process.place.ledger_url) as connection:
                await process.app.outbox.add_many(connection, [Event(topic="orders", key="k", payload={"n": 1})])
                job = await process.app.tasks["plain"].options(connection=connection, idempotency_key="tx").submit()
            world.accept("tx", job.id)
            world.notes["written"] = True

    async def relay(self, process: Process, world: World) -> None:
        outbox = process.app.outbox_port
        assert outbox is not None
        relaying = Relaying(process.app, outbox)
        running = asyncio.create_task(relaying.run())
        store = await again(outbox.open)
        for _ in range(2_000):
            found = await again(lambda: store.find(None, limit=10))
            if all(each.status is Status.SENT for each in found):
                break
            await asyncio.sleep(0.005)
            process.place.tick()
        relaying.stop()
        await running

    def steps(self) -> Sequence[Step]:
        return (self.write, self.relay, work, keep)

    async def check(self, process: Process, world: World) -> None:
        # At least once, and marked as sent only when it was.
        assert MemoryBroker.named(_BROKER).messages("orders")


@asynccontextmanager
async def users_transaction(url: str) -> AsyncIterator[Any]:
    from tests.outbox.support import transaction

    with outside():
        async with transaction(url) as connection:
            yield connection


def _all_jobs() -> Any:
    from holdfast.ledger.listing import JobFilter

    return JobFilter()


STORIES: Final[dict[str, Story]] = {
    story.name: story for story in (Life(), Acting(), Letters(), Deciding(), Verbs(), Durable(), Publishing())
}
