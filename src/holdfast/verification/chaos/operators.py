"""The people of a chaos run: they approve and reject, cancel and expedite, replay dead letters, pause a queue, and
settle effects in doubt.

All of it through the HTTP service, again and again until there is an answer; what becomes of effects, for which the
service has no door, through the same office as `holdfast effects resolve`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from holdfast.app import Holdfast
from holdfast.core.principal import ALL_TENANTS, AuditEntry, Principal, Role
from holdfast.core.retry import Backoff
from holdfast.core.states import OPERATOR_PREFIX
from holdfast.errors import Conflict, EffectInDoubt, TransitionInvalid, Unavailable
from holdfast.ledger.port.effects import EffectOutcome, EffectState
from holdfast.ledger.queries.operators import EffectQueries
from holdfast.operations.operations import Operations
from holdfast.operations.suspended import SuspendedFilter
from holdfast.verification.chaos.load import (
    CANCELLED,
    EXPEDITED,
    REPLAYED,
    RESOLVED,
    ServiceClient,
    SubmissionJournal,
    SubmissionRefused,
)
from holdfast.verification.chaos.workload import SIDE_QUEUE, WorkItem, external_effects, work_item

_ROUND_S: Final = 0.5
_HANDS: Final = 10
#: One dead letter in so many is tried again.
_REPLAY_ONE_OF: Final = 4
#: One delayed job in so many is wanted at once.
_EXPEDITE_ONE_OF: Final = 3
#: Seconds between two pauses of a queue, and how long one is.
_WORKS_S: Final = (5.0, 15.0)
_PAUSED_S: Final = (0.2, 1.5)
_GONE: Final = frozenset({404, 409, 410})
_PAGE: Final = 500
#: Whoever watches over the run. Not the one who submits: nobody approves their own jobs.
OPERATOR: Final = Principal(name="overseer", role=Role.ADMIN, tenants=frozenset({ALL_TENANTS}))


class SimulatedOperators:
    """They do their rounds until cancelled."""

    def __init__(self, web: ServiceClient, journal: SubmissionJournal, *, seed: int, folder: Path) -> None:
        """`web`: with a token of a person who submits nothing."""
        self._web = web
        self._journal = journal
        self._seed = seed
        self._folder = folder
        self._random = Random(f"{seed}:people")
        self._under_way: set[asyncio.Task[None]] = set()
        self._holds_up = False
        self._seen_letters: set[str] = set()
        #: So many votes at a time.
        self._hands = asyncio.Semaphore(_HANDS)
        #: What they did → how often.
        self.deeds: Counter[str] = Counter()
        #: What the service would not let them do, other than because it was too late: they may do everything.
        self.refused: list[str] = []

    def accepted(self, each: WorkItem, job_id: str) -> None:
        """A job is there that they may have to do something about."""
        if each.decision == "cancel":
            self._later(self._cancel(each, job_id, self._random.uniform(0, 1.5)))
        elif each.delay_s and each.number % _EXPEDITE_ONE_OF == 0:
            self._later(self._expedite(each, job_id))

    @property
    def busy(self) -> bool:
        """Whether somebody waits for an answer that may still change something."""
        return bool(self._under_way) or self._holds_up

    async def run(self) -> None:
        """Rounds without end. A service that is away is tried again."""
        try:
            duties = (self._decide, self._replay, self._hold_up)
            await asyncio.gather(*map(self._again_and_again, duties))
        finally:
            for task in self._under_way:
                task.cancel()

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _again_and_again(self, duty: Callable[[], Awaitable[None]]) -> None:
        while True:
            # Who is not there now may be in the next round.
            with suppress(Unavailable):
                await duty()
            await asyncio.sleep(_ROUND_S)

    async def _cancel(self, each: WorkItem, job_id: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        path, params = f"/api/v1/jobs/{job_id}/cancel", {"queue": each.queue}
        if await self._do("cancelled", path, "nobody wants it", params=params) is not None:
            self._journal.write(CANCELLED, each.number, job_id)

    async def _expedite(self, each: WorkItem, job_id: str) -> None:
        """What waits for its time is due now, unless it is already."""
        path, params = f"/api/v1/jobs/{job_id}/retry", {"queue": each.queue}
        if await self._do("expedited", path, "somebody waits for it", params=params) is not None:
            self._journal.write(EXPEDITED, each.number, job_id)

    async def _hold_up(self) -> None:
        """Pause a queue for a moment. Not the one of the probes, which measure how long faults hold it up."""
        await asyncio.sleep(self._random.uniform(*_WORKS_S))
        self._holds_up = True
        await self._pull("paused", "pause", paused=True)
        await asyncio.sleep(self._random.uniform(*_PAUSED_S))
        await self._pull("resumed", "resume", paused=False)
        self._holds_up = False

    async def _pull(self, deed: str, lever: str, *, paused: bool) -> None:
        """Until it is seen to be so: a fail-over may have forgotten it."""
        while True:
            answer = await self._do(deed, f"/api/v1/queues/{SIDE_QUEUE}/{lever}", "the printer burns")
            if answer is not None and answer["paused"] == paused:
                return
            await asyncio.sleep(_ROUND_S)

    async def _decide(self) -> None:
        page = await self._web.call("GET", "/api/v1/approvals", params={"status": "requested", "limit": 500})
        # Jobs whose receipts have not come yet have their turn in the next round.
        known = [approval for approval in page["approvals"] if approval["job_id"] in self._journal.numbers]
        await asyncio.gather(*map(self._vote, known))

    async def _vote(self, approval: dict[str, Any]) -> None:
        number = self._journal.numbers[approval["job_id"]]
        decision = work_item(self._seed, number, self._folder).decision
        async with self._hands:
            await self._do("voted", f"/api/v1/approvals/{approval['approval_id']}/{decision}", "it was due")

    async def _replay(self) -> None:
        page = await self._web.call("GET", "/api/v1/dlq", params={"status": "open", "limit": 500})
        for letter in page["letters"]:
            number = self._journal.numbers.get(letter["job_id"])
            if number is None or letter["dlq_id"] in self._seen_letters:
                continue
            self._seen_letters.add(letter["dlq_id"])
            if number % _REPLAY_ONE_OF == 0:
                self._later(self._run_again(number, letter))

    async def _run_again(self, number: int, letter: dict[str, Any]) -> None:
        answer = await self._do("replayed", f"/api/v1/dlq/{letter['dlq_id']}/replay", "try again")
        if answer is not None:
            self._journal.write(REPLAYED, number, answer["job_id"], letter["job_id"])

    async def _do(self, deed: str, path: str, reason: str, **request: Any) -> Any:
        """The answer; None if it was too late for that. No answer may mean that it was done: then it is too late."""
        backoff = Backoff()
        while True:
            try:
                answer = await self._web.call("POST", path, json={"reason": reason}, **request)
            except Unavailable:
                await asyncio.sleep(min(1.0, backoff.next_s()))
            except SubmissionRefused as exc:
                if exc.status not in _GONE:
                    self.refused.append(f"{path}: {exc}")
                return None
            else:
                self.deeds[deed] += 1
                return answer


async def resolve_effects(app: Holdfast, journal: SubmissionJournal, folder: Path) -> int:
    """Look at the outside world and say of every effect in doubt whether it was done; its job goes on.

    Only when nobody can act any more who has lost the right to: all processes run, and had time to notice. Returns how
    many jobs went on.
    """
    offices, settled = Operations.for_app(app), 0
    happened = frozenset(external_effects(folder))
    page = await offices.suspended.list(OPERATOR, SuspendedFilter(error_code=EffectInDoubt.code), _PAGE)
    for job in page.jobs:
        number = journal.numbers.get(job.job_id)
        if number is None:
            continue
        key = str(work_item(journal.seed, number, folder).arguments["key"])
        try:
            await resolve_effect(app, job.tenant_id, key, done=key in happened)
            await offices.operating.resume(OPERATOR, job.job_id, queue=job.queue, reason="somebody has looked")
        except (TransitionInvalid, Conflict):
            # The list is the ledger's, and a moment late.
            continue
        journal.write(RESOLVED, number, job.job_id, "done" if key in happened else "not done")
        settled += 1
    return settled


async def resolve_effect(app: Holdfast, tenant_id: str, key: str, *, done: bool) -> None:
    """Say of one effect in doubt whether it was done."""
    ledger = app.ledger_backend
    assert ledger is not None
    row = await EffectQueries(ledger.queries.engine).find(tenant_id, key)
    if row is None or row.state == EffectState.DONE:
        # Free already, or its holder came back and has said so.
        return
    outcome = EffectOutcome(
        tenant_id=tenant_id,
        key=key,
        token=row.token,
        state=EffectState.DONE if done else None,
        value=msgspec.json.encode(key) if done else None,
    )
    action = AuditEntry(
        type=f"{OPERATOR_PREFIX}resolve_effect",
        actor=OPERATOR.name,
        tenant_id=tenant_id,
        target="effect",
        target_id=key,
        queue=row.queue,
        reason="somebody has looked",
        before={"state": row.state},
        after={"state": EffectState.DONE.value if done else None},
    )
    await ledger.operators.resolve_effect(outcome, action)
