"""An app's engines and ledgers, one of each per event loop, all on the same stores.

An engine and a ledger belong to one event loop. `LoopConnections` creates them when a loop first needs them, so the
same app works in a web server, behind the blocking portal, and in a script that calls `asyncio.run` twice.
`LedgerClient` is `app.ledger`: queries on the ledger of the running loop, and waiting until it has caught up.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from holdfast.aio import raise_if_cancelled
from holdfast.client.submitter import BatchingSubmitter, Submitter
from holdfast.core.job import Envelope
from holdfast.core.retry import Backoff, Duration, duration_ms
from holdfast.engine.port import Engine
from holdfast.engine.port.feed import EngineSnapshot, FeedEntry
from holdfast.errors import EngineUnavailable, InvalidOption, LedgerRefused, LedgerUnavailable
from holdfast.forking import is_inside_parents_loop, leave_to_parent, on_fork, running_loop
from holdfast.guard.runner import GuardRunner
from holdfast.webhooks.deliveries import WebhookPolicy

if TYPE_CHECKING:
    from holdfast.factory import OutboxHandle
    from holdfast.ledger.port.ledger import FeedPosition, Ledger, Projection
    from holdfast.ledger.queries.jobs import Queries


_log: Final = logging.getLogger("holdfast.submit")
_ledger_log: Final = logging.getLogger("holdfast.ledger")

#: How long a first submission waits for a ledger that does not answer, and how long who asks for it to be opened.
_SUBMIT_PATIENCE_S: Final = 1.0
_OPEN_PATIENCE_S: Final = 3.0


class LoopConnection:
    """An event loop, its engine and ledger, and its desk once the engine is open."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        engine: Engine,
        ledger: Ledger | None,
        gate: GuardRunner | None,
        postmark: WebhookPolicy | None,
        durable_timeout_s: float,
        build_outbox: Callable[[Ledger | None], OutboxHandle | None] = lambda _: None,
    ) -> None:
        self.loop = loop
        self.engine = engine
        self.ledger = ledger
        self._batching: BatchingSubmitter | None = None
        #: What callers get: the submitter, or a desk in front of it.
        self.submitter: Submitter | None = None
        self._gate = gate
        self._postmark = postmark
        self._durable_timeout_s = durable_timeout_s
        self._build_outbox = build_outbox
        self._outbox: OutboxHandle | None = None
        self._opening = asyncio.Lock()
        #: What the ledger said when it was opened, if it said no.
        self.refusal: LedgerRefused | None = None
        #: Opens the ledger; submission does not wait for it for long.
        self._looking: asyncio.Task[None] | None = None

    async def open(self, patience_s: float = _SUBMIT_PATIENCE_S) -> BatchingSubmitter:
        async with self._opening:
            if self._batching is None:
                await self.engine.open()
                await self._open_ledger(patience_s)
                self._batching = BatchingSubmitter(
                    self.engine,
                    self.ledger,
                    durable_timeout_s=self._durable_timeout_s,
                    gate=self._gate,
                    postmark=self._postmark,
                )
            return self._batching

    async def close(self) -> None:
        try:
            if self._looking is not None:
                self._looking.cancel()
                await asyncio.wait({self._looking})
            if self._batching is not None:
                await self._batching.close()
            if self._outbox is not None:
                await self._outbox.close()
            await self.engine.close()
        finally:
            if self.ledger is not None:
                await self.ledger.close()

    async def discard(self) -> None:
        """Close a temporary store on another event loop than its own; calls that are in flight there fail."""
        await self.engine.close()
        if self.ledger is not None:
            await self.ledger.close()

    async def prepare(self, envelopes: Sequence[Envelope]) -> list[Envelope]:
        """What a desk would hand in, checked and shown to the guards alike; needs no engine."""
        if self._postmark is not None:
            envelopes = [self._postmark.apply(envelope) for envelope in envelopes]
        return list(envelopes if self._gate is None else await self._gate.review_all(envelopes))

    def outbox(self) -> OutboxHandle | None:
        """Where the relay's end of the outbox is, open or not; None if there is none."""
        if self._outbox is None:
            self._outbox = self._build_outbox(self.ledger)
        return self._outbox

    async def _open_ledger(self, patience_s: float) -> None:
        """A ledger that is down stops nothing (requirement L3), nor does waiting for it: it is looked at as soon as it
        answers. One that is there and wrong must not be worked with; if it is late to say so, the log does."""
        if self.ledger is None:
            return
        if self._looking is not None:
            self._looking.cancel()
        first: asyncio.Future[Exception | None] = self.loop.create_future()
        self._looking = asyncio.create_task(_look(self.ledger, first), name="holdfast-ledger-opening")
        try:
            await asyncio.wait({first}, timeout=patience_s)
        finally:
            late = first.cancel()
        error = None if late else first.result()
        if late:
            _ledger_log.warning("going on without the ledger, which has not answered for %g s", patience_s)
        elif isinstance(error, LedgerRefused):
            self.refusal = error
            _ledger_log.error("ledger refuses the connection, the feed is retained: %s", error)
        elif isinstance(error, LedgerUnavailable):
            _ledger_log.warning("going on without the ledger, the feed waits for it: %s", error)
        elif error is not None:
            raise error


def _discard(links: Sequence[LoopConnection]) -> None:
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        here = None

    async def discard_all() -> None:
        for link in links:
            if link.loop.is_running() and link.loop is not here:
                # In another thread, where it can be closed as it should be.
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(link.close(), link.loop))
            else:
                await link.discard()

    if links:
        # In a thread: the loop that runs here waits.
        closing = threading.Thread(target=lambda: asyncio.run(discard_all()), name="holdfast-discard")
        closing.start()
        closing.join()


async def _look(ledger: Ledger, first: asyncio.Future[Exception | None]) -> None:
    """Open the ledger, however long that takes. The outcome of the first try is handed over if it is still wanted."""
    backoff = Backoff()
    while True:
        error: Exception | None = None
        try:
            await ledger.open()
        except Exception as exc:  # noqa: BLE001 - handed over, or told
            error = exc
        if not first.done():
            first.set_result(error)
        elif error is not None and not isinstance(error, LedgerUnavailable):
            _ledger_log.critical("the ledger cannot be worked with, the feed waits until it is put right: %s", error)
        if not isinstance(error, LedgerUnavailable):
            return
        raise_if_cancelled()
        await asyncio.sleep(backoff.next_s())


class LoopConnections:
    """Finds or makes the link of the running loop. Safe to use from any thread."""

    def __init__(
        self,
        build: Callable[[], Engine],
        build_ledger: Callable[[Engine], Ledger | None] = lambda _: None,
        durable_timeout_s: float = 10.0,
        build_gate: Callable[[Ledger | None], GuardRunner | None] = lambda _: None,
        build_postmark: Callable[[Ledger | None], WebhookPolicy | None] = lambda _: None,
        front: Callable[[BatchingSubmitter], Submitter] = lambda submitter: submitter,
        build_outbox: Callable[[Ledger | None], OutboxHandle | None] = lambda _: None,
        *,
        temporary: bool = False,
    ) -> None:
        """`front`: what stands before a submitter, once that is open. `temporary`: the store is this app's alone."""
        self._temporary = temporary
        self._build_outbox = build_outbox
        self._build = build
        self._build_ledger = build_ledger
        self._build_gate = build_gate
        self._build_postmark = build_postmark
        self._front = front
        self._durable_timeout_s = durable_timeout_s
        self._lock = threading.Lock()
        self._first: Engine | None = None
        self._taken = False
        self._links: dict[asyncio.AbstractEventLoop, LoopConnection] = {}
        #: The link used last; most programs have only one.
        self._latest: LoopConnection | None = None
        on_fork(self)

    def after_fork(self) -> None:
        """In a child process: links and the lock are the parent's. Stores are opened again by the first use."""
        self._lock = threading.Lock()
        leave_to_parent((self._links, self._first))
        self._links = {}
        self._latest = None
        if self._taken and self._first is not None:
            self._first = self._first.clone()
            self._taken = False

    @property
    def in_use(self) -> bool:
        """Whether an engine has been handed out to an event loop that is not closed."""
        return any(not loop.is_closed() for loop in self._links)

    def discard(self) -> None:
        """Close everything from outside its event loops, whether they run or are closed. For temporary stores."""
        with self._lock:
            links, self._links, self._latest = list(self._links.values()), {}, None
        _discard(links)

    def engine(self) -> Engine:
        """The engine of the running loop, open or not; without a loop the first one."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            with self._lock:
                return self._first_engine()
        return self._link(loop).engine

    def ledger(self) -> Ledger | None:
        """The ledger of the running loop, open or not."""
        return self._link(running_loop()).ledger

    def ledger_refusal(self) -> LedgerRefused | None:
        """Why the ledger of the running loop refused the login when it was opened; None if it did not."""
        return self._link(running_loop()).refusal

    def outbox(self) -> OutboxHandle | None:
        """The outbox of the running loop, open or not."""
        return self._link(running_loop()).outbox()

    async def prepare(self, envelopes: Sequence[Envelope]) -> list[Envelope]:
        """Jobs as they may be handed in, by whomever."""
        return await self._link(running_loop()).prepare(envelopes)

    async def open(self) -> None:
        """Open the engine of this loop, and its ledger if that can be reached. Safe to call twice."""
        await self._link(running_loop()).open(_OPEN_PATIENCE_S)

    async def submitter(self) -> Submitter:
        """The desk of this loop, opened if need be."""
        loop, link = running_loop(), self._latest
        if link is None or link.loop is not loop:
            link = self._latest = self._link(loop)
        try:
            if link.submitter is None:
                link.submitter = self._front(link._batching or await link.open())
            return link.submitter
        except EngineUnavailable as exc:
            _log.critical("the engine cannot be reached, nothing can be submitted: %s", exc)
            raise

    async def close(self) -> None:
        """Close engine and ledger of this loop; the next use makes new ones."""
        if is_inside_parents_loop():
            return
        with self._lock:
            link = self._links.pop(asyncio.get_running_loop(), None)
            self._latest = None
        if link is not None:
            await link.close()

    def _link(self, loop: asyncio.AbstractEventLoop) -> LoopConnection:
        with self._lock:
            link = self._links.get(loop)
            if link is None:
                gone = [self._links.pop(other) for other in list(self._links) if other.is_closed()]
                if self._temporary:
                    # Others are left to their drivers: what they hold belongs to an event loop that is closed.
                    _discard(gone)
                engine = self._next_engine()
                ledger = self._build_ledger(engine)
                gate = self._build_gate(ledger)
                postmark = self._build_postmark(ledger)
                link = self._links[loop] = LoopConnection(
                    loop, engine, ledger, gate, postmark, self._durable_timeout_s, self._build_outbox
                )
            return link

    def _next_engine(self) -> Engine:
        # The first engine serves the first loop; every further loop gets a sibling on the same store.
        taken = self._taken
        self._taken = True
        first = self._first_engine()
        return first.clone() if taken else first

    def _first_engine(self) -> Engine:
        if self._first is None:
            self._first = self._build()
        return self._first


_WAIT_MS: Final = 1_000
_CAUGHT_UP_S: Final = 30.0


class LedgerClient:
    """Asks the ledger, and waits for it. Every method raises `InvalidOption` if the app has none."""

    def __init__(self, engine: Callable[[], Engine], ledger: Callable[[], Ledger | None]) -> None:
        self._engine = engine
        self._ledger = ledger

    @property
    def queries(self) -> Queries:
        """Jobs, stories and counts: what the ledger remembers."""
        return self._there().queries

    async def wait_caught_up(self, timeout: Duration = _CAUGHT_UP_S) -> None:
        """Wait until everything that is in the engine's feeds now is in the ledger.

        Embedded it returns at once. Raises `LedgerUnavailable` if it takes longer than `timeout`, and says why.
        """
        deadline = time.monotonic() + duration_ms(timeout, "timeout") / 1000
        engine, ledger = self._engine(), self._there()
        projection = ledger.projection
        if projection is None:
            return
        for queue in await engine.queues():
            await _wait(projection, queue, await engine.snapshot(queue, []), deadline)

    def _there(self) -> Ledger:
        ledger = self._ledger()
        if ledger is None:
            raise InvalidOption(
                "this app has no ledger: Redis keeps none; set HOLDFAST_LEDGER to postgresql://… or sqlite:///ledger.db"
            )
        return ledger


async def _wait(projection: Projection, queue: str, end: EngineSnapshot, deadline: float) -> None:
    """Until the ledger has the feed's last entry: that very entry, since positions of two feeds cannot be compared."""
    if not end.position:
        return
    last = FeedEntry(end.position, end.nonce, [])
    at: FeedPosition | None = None
    trouble: LedgerUnavailable | None = None
    while True:
        left_ms = round((deadline - time.monotonic()) * 1000)
        try:
            # The position is read before the entry is looked for: a move in between ends the wait at once.
            at = await projection.position(queue)
            if (at.position, at.nonce) == (end.position, end.nonce):
                # An entry that tells of nothing is not kept, only passed.
                return
            if end.position in await projection.already_written(queue, [last]):
                return
            if left_ms <= 0:
                raise _behind(queue, at, end)
            trouble = None
            await projection.wait_position_change(queue, at, min(left_ms, _WAIT_MS))
        except LedgerUnavailable as exc:
            if left_ms <= 0:
                raise trouble or exc from None
            trouble = exc
            await asyncio.sleep(min(left_ms / 1000, 0.1))


def _behind(queue: str, at: FeedPosition, end: EngineSnapshot) -> LedgerUnavailable:
    reached = f"is at {at.position}" if at.position else "has nothing"
    return LedgerUnavailable(
        f"the ledger answers, but {reached} of queue {queue}'s feed, which ends at {end.position}; "
        "does a worker of that queue or `holdfast upkeep` run?"
    )
