"""Simulated operators of a chaos run: approve, reject, cancel, expedite, replay, pause a queue, resolve effects.

They use the HTTP service and repeat each request until there is an answer. Effects in doubt, for which the service has
no endpoint, are resolved in the ledger, as `holdfast effects resolve` does.
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
from holdfast.execution.backend import backend_of
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
_MAX_VOTES: Final = 10
#: One dead letter in this many is replayed.
_REPLAY_ONE_OF: Final = 4
#: One delayed job in this many is expedited.
_EXPEDITE_ONE_OF: Final = 3
#: Ranges in seconds: between two pauses of a queue, and of a pause.
_WORKS_S: Final = (5.0, 15.0)
_PAUSED_S: Final = (0.2, 1.5)
_GONE: Final = frozenset({404, 409, 410})
_PAGE: Final = 500
#: Not the principal that submits: a principal cannot approve its own jobs.
OPERATOR: Final = Principal(name="operator", role=Role.ADMIN, tenants=frozenset({ALL_TENANTS}))


class SimulatedOperators:
    """Runs the operators' duties until cancelled."""

    def __init__(self, web: ServiceClient, journal: SubmissionJournal, *, seed: int, folder: Path) -> None:
        """`web`: a client with the token of a principal that does not submit."""
        self._web = web
        self._journal = journal
        self._seed = seed
        self._folder = folder
        self._random = Random(f"{seed}:people")
        self._in_flight: set[asyncio.Task[None]] = set()
        self._pausing = False
        self._known_dead_letters: set[str] = set()
        #: Limits concurrent votes.
        self._votes = asyncio.Semaphore(_MAX_VOTES)
        #: Action → how often.
        self.counts: Counter[str] = Counter()
        #: Requests that the service refused, except those that came too late. Each is a defect: operators are admins.
        self.refused: list[str] = []

    def accepted(self, each: WorkItem, job_id: str) -> None:
        """Schedule the action for an accepted job, if it needs one."""
        if each.decision == "cancel":
            self._later(self._cancel(each, job_id, self._random.uniform(0, 1.5)))
        elif each.delay_s and each.number % _EXPEDITE_ONE_OF == 0:
            self._later(self._expedite(each, job_id))

    @property
    def busy(self) -> bool:
        """Whether a request is in flight that may still change something."""
        return bool(self._in_flight) or self._pausing

    async def run(self) -> None:
        """Repeat all duties until cancelled, also while the service is unreachable."""
        try:
            duties = (self._decide, self._replay, self._pause)
            await asyncio.gather(*map(self._repeat, duties))
        finally:
            for task in self._in_flight:
                task.cancel()

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)

    async def _repeat(self, duty: Callable[[], Awaitable[None]]) -> None:
        while True:
            # The service may be reachable in the next round.
            with suppress(Unavailable):
                await duty()
            await asyncio.sleep(_ROUND_S)

    async def _cancel(self, each: WorkItem, job_id: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        path, params = f"/api/v1/jobs/{job_id}/cancel", {"queue": each.queue}
        if await self._do("cancelled", path, "no longer needed", params=params) is not None:
            self._journal.write(CANCELLED, each.number, job_id)

    async def _expedite(self, each: WorkItem, job_id: str) -> None:
        """Make a delayed job due now, unless it already is."""
        path, params = f"/api/v1/jobs/{job_id}/retry", {"queue": each.queue}
        if await self._do("expedited", path, "needed now", params=params) is not None:
            self._journal.write(EXPEDITED, each.number, job_id)

    async def _pause(self) -> None:
        """Pause a queue for a moment; not the queue of the probes, which measure recovery."""
        await asyncio.sleep(self._random.uniform(*_WORKS_S))
        self._pausing = True
        await self._set_paused("paused", "pause", paused=True)
        await asyncio.sleep(self._random.uniform(*_PAUSED_S))
        await self._set_paused("resumed", "resume", paused=False)
        self._pausing = False

    async def _set_paused(self, action: str, verb: str, *, paused: bool) -> None:
        """Repeat until the answer confirms the state: a fail-over may have lost the write."""
        while True:
            answer = await self._do(action, f"/api/v1/queues/{SIDE_QUEUE}/{verb}", "maintenance")
            if answer is not None and answer["paused"] == paused:
                return
            await asyncio.sleep(_ROUND_S)

    async def _decide(self) -> None:
        page = await self._web.call("GET", "/api/v1/approvals", params={"status": "requested", "limit": 500})
        # Jobs without a receipt yet are left to the next round.
        known = [approval for approval in page["approvals"] if approval["job_id"] in self._journal.numbers]
        await asyncio.gather(*map(self._vote, known))

    async def _vote(self, approval: dict[str, Any]) -> None:
        number = self._journal.numbers[approval["job_id"]]
        decision = work_item(self._seed, number, self._folder).decision
        async with self._votes:
            await self._do("voted", f"/api/v1/approvals/{approval['approval_id']}/{decision}", "as planned")

    async def _replay(self) -> None:
        page = await self._web.call("GET", "/api/v1/dlq", params={"status": "open", "limit": 500})
        for dead_letter in page["dead_letters"]:
            number = self._journal.numbers.get(dead_letter["job_id"])
            if number is None or dead_letter["dlq_id"] in self._known_dead_letters:
                continue
            self._known_dead_letters.add(dead_letter["dlq_id"])
            if number % _REPLAY_ONE_OF == 0:
                self._later(self._replay_one(number, dead_letter))

    async def _replay_one(self, number: int, dead_letter: dict[str, Any]) -> None:
        answer = await self._do("replayed", f"/api/v1/dlq/{dead_letter['dlq_id']}/replay", "try again")
        if answer is not None:
            self._journal.write(REPLAYED, number, answer["job_id"], dead_letter["job_id"])

    async def _do(self, action: str, path: str, reason: str, **request: Any) -> Any:
        """Repeat a request until there is an answer, and return it; None if it came too late or was refused.

        A request without an answer may have been carried out: its repetition then comes too late.
        """
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
                self.counts[action] += 1
                return answer


async def resolve_effects(app: Holdfast, journal: SubmissionJournal, folder: Path) -> int:
    """Resolve every effect in doubt according to the effects file and resume its job.

    Returns the number of resumed jobs. Call it only when no worker without a lease can still act: all processes run and
    have had time to notice lost leases.
    """
    operations, resolved = Operations.for_app(app), 0
    happened = frozenset(external_effects(folder))
    page = await operations.suspended.list(OPERATOR, SuspendedFilter(error_code=EffectInDoubt.code), _PAGE)
    for job in page.jobs:
        number = journal.numbers.get(job.job_id)
        if number is None:
            continue
        key = str(work_item(journal.seed, number, folder).arguments["key"])
        try:
            await resolve_effect(app, job.tenant_id, key, done=key in happened)
            await operations.jobs.resume(OPERATOR, job.job_id, queue=job.queue, reason="effect checked")
        except (TransitionInvalid, Conflict):
            # The list comes from the ledger, which may lag behind.
            continue
        journal.write(RESOLVED, number, job.job_id, "done" if key in happened else "not done")
        resolved += 1
    return resolved


async def resolve_effect(app: Holdfast, tenant_id: str, key: str, *, done: bool) -> None:
    """Resolve one effect in doubt as done or not done."""
    ledger = backend_of(app).ledger
    assert ledger is not None
    row = await EffectQueries(ledger.queries.engine).find(tenant_id, key)
    if row is None or row.state == EffectState.DONE:
        # Already released, or its holder has recorded it.
        return
    outcome = EffectOutcome(
        tenant_id=tenant_id,
        key=key,
        token=row.token,
        state=EffectState.DONE if done else None,
        value=msgspec.json.encode(key) if done else None,
    )
    audit = AuditEntry(
        type=f"{OPERATOR_PREFIX}resolve_effect",
        actor=OPERATOR.name,
        tenant_id=tenant_id,
        target="effect",
        target_id=key,
        queue=row.queue,
        reason="effect checked",
        before={"state": row.state},
        after={"state": EffectState.DONE.value if done else None},
    )
    await ledger.operators.resolve_effect(outcome, audit)
