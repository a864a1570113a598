"""An app's engines and ledgers, one of each per event loop, all on the same stores.

They belong to one event loop. So the same app works in a web server, behind the blocking door, and
in a script that calls `asyncio.run` twice: each loop gets its own when it first asks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from holdfast.cancelling import obey_cancellation
from holdfast.core.backoff import Backoff
from holdfast.core.job import Envelope
from holdfast.engine.port import Engine
from holdfast.errors import EngineUnavailable, LedgerRefused, LedgerUnavailable
from holdfast.forking import is_inside_parents_loop, leave_to_parent, on_fork, running_loop
from holdfast.guard.gate import Gate
from holdfast.submitter import Desk, Submitter
from holdfast.webhooks.postmark import Postmark

if TYPE_CHECKING:
    # Its queries load SQLAlchemy, which an app without a ledger does not need.
    from holdfast.ledger.factory import OutboxDoor
    from holdfast.ledger.port import Ledger

_log: Final = logging.getLogger("holdfast.submit")
_ledger_log: Final = logging.getLogger("holdfast.ledger")

#: How long a first submission waits for a ledger that does not answer, and how long who asks for it to be opened.
_SUBMIT_PATIENCE_S: Final = 1.0
_OPEN_PATIENCE_S: Final = 3.0


class Link:
    """An event loop, its engine and ledger, and its desk once the engine is open."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        engine: Engine,
        ledger: Ledger | None,
        gate: Gate | None,
        postmark: Postmark | None,
        durable_timeout_s: float,
        build_outbox: Callable[[Ledger | None], OutboxDoor | None] = lambda _: None,
    ) -> None:
        self.loop = loop
        self.engine = engine
        self.ledger = ledger
        self.submitter: Submitter | None = None
        #: What callers get: the submitter, or a desk in front of it.
        self.desk: Desk | None = None
        self._gate = gate
        self._postmark = postmark
        self._durable_timeout_s = durable_timeout_s
        self._build_outbox = build_outbox
        self._outbox: OutboxDoor | None = None
        self._opening = asyncio.Lock()
        #: What the ledger said when it was opened, if it said no.
        self.refusal: LedgerRefused | None = None
        #: Opens the ledger; submission does not wait for it for long.
        self._looking: asyncio.Task[None] | None = None

    async def open(self, patience_s: float = _SUBMIT_PATIENCE_S) -> Submitter:
        async with self._opening:
            if self.submitter is None:
                await self.engine.open()
                await self._open_ledger(patience_s)
                self.submitter = Submitter(
                    self.engine,
                    self.ledger,
                    durable_timeout_s=self._durable_timeout_s,
                    gate=self._gate,
                    postmark=self._postmark,
                )
            return self.submitter

    async def close(self) -> None:
        try:
            if self._looking is not None:
                self._looking.cancel()
                await asyncio.wait({self._looking})
            if self.submitter is not None:
                await self.submitter.close()
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

    async def admit(self, envelopes: Sequence[Envelope]) -> list[Envelope]:
        """What a desk would hand in, checked and shown to the guards alike; needs no engine."""
        if self._postmark is not None:
            envelopes = [self._postmark.stamp(envelope) for envelope in envelopes]
        return list(envelopes if self._gate is None else await self._gate.admit_all(envelopes))

    def outbox(self) -> OutboxDoor | None:
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


def _discard(links: Sequence[Link]) -> None:
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
        obey_cancellation()
        await asyncio.sleep(backoff.next_s())


class Links:
    """Finds or makes the link of the running loop. Safe to use from any thread."""

    def __init__(
        self,
        build: Callable[[], Engine],
        build_ledger: Callable[[Engine], Ledger | None] = lambda _: None,
        durable_timeout_s: float = 10.0,
        build_gate: Callable[[Ledger | None], Gate | None] = lambda _: None,
        build_postmark: Callable[[Ledger | None], Postmark | None] = lambda _: None,
        front: Callable[[Submitter], Desk] = lambda submitter: submitter,
        build_outbox: Callable[[Ledger | None], OutboxDoor | None] = lambda _: None,
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
        self._links: dict[asyncio.AbstractEventLoop, Link] = {}
        #: The link used last; most programs have only one.
        self._latest: Link | None = None
        on_fork(self)

    def after_fork(self) -> None:
        """In a child process: links and the lock are the parent's. Stores are opened again by the first use."""
        self._lock = threading.Lock()
        leave_to_parent((self._links, self._first))
        self._links = {}
        self._latest = None
        if self._taken and self._first is not None:
            self._first = self._first.sibling()
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

    def outbox(self) -> OutboxDoor | None:
        """The outbox of the running loop, open or not."""
        return self._link(running_loop()).outbox()

    async def admit(self, envelopes: Sequence[Envelope]) -> list[Envelope]:
        """Jobs as they may be handed in, by whomever."""
        return await self._link(running_loop()).admit(envelopes)

    async def open(self) -> None:
        """Open the engine of this loop, and its ledger if that can be reached. Safe to call twice."""
        await self._link(running_loop()).open(_OPEN_PATIENCE_S)

    async def desk(self) -> Desk:
        """The desk of this loop, opened if need be."""
        loop, link = running_loop(), self._latest
        if link is None or link.loop is not loop:
            link = self._latest = self._link(loop)
        try:
            if link.desk is None:
                link.desk = self._front(link.submitter or await link.open())
            return link.desk
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

    def _link(self, loop: asyncio.AbstractEventLoop) -> Link:
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
                link = self._links[loop] = Link(
                    loop, engine, ledger, gate, postmark, self._durable_timeout_s, self._build_outbox
                )
            return link

    def _next_engine(self) -> Engine:
        # The first engine serves the first loop; every further loop gets a sibling on the same store.
        taken = self._taken
        self._taken = True
        first = self._first_engine()
        return first.sibling() if taken else first

    def _first_engine(self) -> Engine:
        if self._first is None:
            self._first = self._build()
        return self._first
