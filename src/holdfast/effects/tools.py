"""What the runs of one worker share to act once: the ledger's desk, a look at other jobs, and what is under way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol

from holdfast.core.backoff import Backoff
from holdfast.core.job import Claim, JobView
from holdfast.effects.desk import Desk
from holdfast.errors import InvalidOption, LedgerUnavailable, RunOver
from holdfast.ledger.port import Effects, Outcome
from holdfast.observe.counts import Counts

_log: Final = logging.getLogger("holdfast.effects")

#: How long the end of an effect is tried to be written when its run is cancelled: less than a cancelled run is given.
LAST_WORD_S: Final = 3.0
#: How long a reservation that was perhaps made, and never used, is tried to be given back.
_GIVE_BACK_S: Final = 600.0


class Ledger(Protocol):
    """What is needed of a ledger."""

    @property
    def effects(self) -> Effects: ...


class Tools:
    """One for each event loop that runs jobs."""

    def __init__(
        self,
        ledger: Callable[[], Awaitable[Ledger | None]],
        find: Callable[[str, str], Awaitable[JobView | None]],
        now_ms: Callable[[], int],
        counts: Counts,
        *,
        lease_s: float,
        payload_limit: int,
    ) -> None:
        """`ledger` opens it if need be; None: there is none. `find` is a look at a job by queue and id."""
        self._ledger = ledger
        self._find = find
        self.now_ms = now_ms
        self.counts = counts
        self.payload_limit = payload_limit
        #: How long to wait for somebody else's effect, and for a ledger that went away between act and record.
        self.patience_s = lease_s
        self.loop = asyncio.get_running_loop()
        #: Reservations whose effect is under way on this loop, by token.
        self.active: dict[str, asyncio.Event] = {}
        #: Reservations that were perhaps made here and never used: nothing has happened under them.
        self.unused: set[str] = set()
        self._desk: Desk | None = None
        self._background: set[asyncio.Task[Any]] = set()

    async def desk(self) -> Desk:
        """Raises `LedgerUnavailable`, or `InvalidOption` if there is no ledger."""
        if self._desk is None:
            ledger = await self._ledger()
            if ledger is None:
                raise InvalidOption(
                    "effects and steps are kept in a ledger, and this app has none: set HOLDFAST_LEDGER "
                    "(postgresql://… or sqlite:///…), or use the SQLite engine, which is its own ledger"
                )
            self._desk = Desk(ledger.effects)
        return self._desk

    async def is_alive(self, queue: str, job_id: str, attempt: int, worker: str) -> bool:
        """Whether this attempt still has its lease."""
        view = await self._find(queue, job_id)
        return view is not None and (view.state, view.attempt, view.worker) == ("running", attempt, worker)

    def later(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run it beside; it does not end with the run that began it."""
        task = self.loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def give_back(self, outcome: Outcome) -> None:
        """A reservation that was perhaps made and will not be used: say so as soon as the ledger answers.

        Its key is free then, or in doubt again if it was so before.
        """
        if outcome.state is None:
            self.unused.add(outcome.token)
        self.later(self._give_back(outcome))

    async def _give_back(self, outcome: Outcome) -> None:
        try:
            await self.persist(outcome, _GIVE_BACK_S)
        except LedgerUnavailable:
            _log.error("the key %r may stay reserved although nothing happened: the ledger is away", outcome.key)
        else:
            self.unused.discard(outcome.token)

    async def persist(self, outcome: Outcome, patience_s: float) -> bool:
        """Conclude, trying again for so long."""
        give_up_at = self.loop.time() + patience_s
        backoff: Backoff | None = None
        while True:
            try:
                return await (await self.desk()).conclude(outcome)
            except LedgerUnavailable:
                backoff = backoff or Backoff()
                pause_s = backoff.next_s()
                if self.loop.time() + pause_s >= give_up_at:
                    raise
                await asyncio.sleep(pause_s)


class Scope:
    """One run of one job, as its effects and steps see it."""

    __slots__ = ("claim", "stopped", "tools", "undecided")

    def __init__(self, claim: Claim, tools: Tools) -> None:
        self.claim = claim
        self.tools = tools
        #: The run was ended from outside; a thread, or a task that swallows its cancellation, goes on all the same.
        self.stopped = False
        #: Effects whose doubt a person has to decide: under way, or ended in doubt. By key, with the reason.
        self.undecided: dict[str, str] = {}

    def check(self, what: str) -> None:
        """Raises `RunOver` once the run is over: another one may be at work already, and would do it again."""
        if self.stopped:
            raise RunOver(self.claim.job_id, what)
