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

from holdfast.after_fork import is_inside_parents_loop, leave_to_parent, on_fork, running_loop
from holdfast.aio import raise_if_cancelled
from holdfast.client.submitter import BatchingSubmitter, Submitter
from holdfast.core.job import Envelope
from holdfast.core.retry import Backoff, Duration, duration_ms
from holdfast.engine.port import Engine, InspectionPort
from holdfast.engine.port.feed import EngineSnapshot, FeedEntry
from holdfast.errors import EngineUnavailable, InvalidOption, LedgerRefused, LedgerUnavailable
from holdfast.guard.runner import GuardRunner
from holdfast.ledger.verification import OPENS_AFTER_S, Verifier
from holdfast.webhooks.deliveries import WebhookPolicy

if TYPE_CHECKING:
    from holdfast.factory import OutboxHandle
    from holdfast.ledger.port.ledger import FeedPosition, Ledger, LedgerReadPort, ProjectionReadPort
    from holdfast.ledger.queries.jobs import Queries


_log: Final = logging.getLogger("holdfast.client")
_ledger_log: Final = logging.getLogger("holdfast.ledger")

#: How long a first submission waits for a ledger that does not answer, and how long an explicit `open`.
_SUBMIT_TIMEOUT_S: Final = 1.0
_OPEN_TIMEOUT_S: Final = 3.0


class LoopConnection:
    """An event loop, its engine and ledger, and its submitter once the engine is open."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        engine: Engine,
        ledger: Ledger | None,
        guards: GuardRunner | None,
        webhook_policy: WebhookPolicy | None,
        durable_timeout_s: float,
        build_outbox: Callable[[Ledger | None], OutboxHandle | None] = lambda _: None,
        opens_after_s: float | None = OPENS_AFTER_S,
    ) -> None:
        self.loop = loop
        self.engine = engine
        self.ledger = ledger
        self._batching: BatchingSubmitter | None = None
        #: What callers use: the batching submitter, or one that wraps it.
        self.submitter: Submitter | None = None
        self._guards = guards
        self._webhook_policy = webhook_policy
        self._durable_timeout_s = durable_timeout_s
        self._build_outbox = build_outbox
        self._outbox: OutboxHandle | None = None
        self._opening = asyncio.Lock()
        #: The ledger's refusal when it was opened, if any.
        self.refusal: LedgerRefused | None = None
        #: Opens the ledger; a submission waits for it only briefly.
        self._ledger_opening: asyncio.Task[None] | None = None
        self._opens_after_s = opens_after_s
        self._verifier: Verifier | None = None

    async def open(self, timeout_s: float = _SUBMIT_TIMEOUT_S) -> BatchingSubmitter:
        async with self._opening:
            if self._batching is None:
                await self.engine.open()
                if self._verifier is None and self.ledger is not None and self.ledger.projection is not None:
                    self._verifier = Verifier(self.engine, self.ledger, self._opens_after_s)
                    self.engine.on_unverified(self._verifier.request)
                await self._open_ledger(timeout_s)
                self._batching = BatchingSubmitter(
                    self.engine,
                    self.ledger,
                    durable_timeout_s=self._durable_timeout_s,
                    guards=self._guards,
                    webhook_policy=self._webhook_policy,
                )
            return self._batching

    async def close(self) -> None:
        try:
            if self._ledger_opening is not None:
                self._ledger_opening.cancel()
                await asyncio.wait({self._ledger_opening})
            if self._verifier is not None:
                await self._verifier.close()
            if self._batching is not None:
                await self._batching.close()
            if self._outbox is not None:
                await self._outbox.close()
            await self.engine.close()
        finally:
            if self.ledger is not None:
                await self.ledger.close()

    async def discard(self) -> None:
        """Close a temporary store from another event loop; calls in flight on its own loop fail."""
        await self.engine.close()
        if self.ledger is not None:
            await self.ledger.close()

    async def prepare(self, envelopes: Sequence[Envelope]) -> list[Envelope]:
        """Check envelopes and let the guards review them, as a submitter does; needs no engine."""
        if self._webhook_policy is not None:
            envelopes = [self._webhook_policy.apply(envelope) for envelope in envelopes]
        return list(envelopes if self._guards is None else await self._guards.review_all(envelopes))

    def outbox(self) -> OutboxHandle | None:
        """The outbox, open or not; None if there is none."""
        if self._outbox is None:
            self._outbox = self._build_outbox(self.ledger)
        return self._outbox

    async def _open_ledger(self, timeout_s: float) -> None:
        """Open the ledger without letting an outage block submission (requirement L3).

        After the timeout, a background task continues to open it. Raises errors that are not an outage, for example
        `SchemaMismatch`; after the timeout, they are logged.
        """
        if self.ledger is None:
            return
        if self._ledger_opening is not None:
            self._ledger_opening.cancel()
        first: asyncio.Future[Exception | None] = self.loop.create_future()
        self._ledger_opening = asyncio.create_task(_open_with_retry(self.ledger, first), name="holdfast-ledger-opening")
        try:
            await asyncio.wait({first}, timeout=timeout_s)
        finally:
            late = first.cancel()
        error = None if late else first.result()
        if late:
            _ledger_log.warning("ledger did not answer within %g s; continuing without it", timeout_s)
        elif isinstance(error, LedgerRefused):
            self.refusal = error
            _ledger_log.error("ledger refuses the connection, the feed is retained: %s", error)
        elif isinstance(error, LedgerUnavailable):
            _ledger_log.warning("ledger unreachable, continuing without it; the feed is retained: %s", error)
        elif error is not None:
            raise error


def _discard(connections: Sequence[LoopConnection]) -> None:
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        here = None

    async def discard_all() -> None:
        for connection in connections:
            if connection.loop.is_running() and connection.loop is not here:
                # It runs in another thread, and can be closed on its own loop.
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(connection.close(), connection.loop))
            else:
                await connection.discard()

    if connections:
        # In a thread, because the loop that runs here is blocked meanwhile.
        closing = threading.Thread(target=lambda: asyncio.run(discard_all()), name="holdfast-discard")
        closing.start()
        closing.join()


async def _open_with_retry(ledger: Ledger, first: asyncio.Future[Exception | None]) -> None:
    """Open the ledger, retrying until it answers.

    The outcome of the first attempt is set on `first`, unless `first` is done.
    """
    backoff = Backoff()
    while True:
        error: Exception | None = None
        try:
            await ledger.open()
        except Exception as exc:  # noqa: BLE001 - passed on, or logged
            error = exc
        if not first.done():
            first.set_result(error)
        elif error is not None and not isinstance(error, LedgerUnavailable):
            _ledger_log.critical("ledger unusable, feed is retained until it is fixed: %s", error)
        if not isinstance(error, LedgerUnavailable):
            return
        raise_if_cancelled()
        await asyncio.sleep(backoff.next_s())


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        # Says so if the coroutine was copied by a fork.
        return running_loop()


class LoopConnections:
    """The connections of an app, one per event loop. Can be used from any thread."""

    def __init__(
        self,
        build: Callable[[], Engine],
        build_ledger: Callable[[Engine], Ledger | None] = lambda _: None,
        durable_timeout_s: float = 10.0,
        build_guards: Callable[[Ledger | None], GuardRunner | None] = lambda _: None,
        build_webhook_policy: Callable[[Ledger | None], WebhookPolicy | None] = lambda _: None,
        front: Callable[[BatchingSubmitter], Submitter] = lambda submitter: submitter,
        build_outbox: Callable[[Ledger | None], OutboxHandle | None] = lambda _: None,
        opens_after_s: float | None = OPENS_AFTER_S,
        *,
        temporary: bool = False,
    ) -> None:
        """`front` wraps a submitter after it is opened. `temporary`: only this app uses the store."""
        self._temporary = temporary
        self._opens_after_s = opens_after_s
        self._build_outbox = build_outbox
        self._build = build
        self._build_ledger = build_ledger
        self._build_guards = build_guards
        self._build_webhook_policy = build_webhook_policy
        self._front = front
        self._durable_timeout_s = durable_timeout_s
        #: Set by inline mode, which runs jobs where they are submitted.
        self.inline_submitter: Submitter | None = None
        self._lock = threading.Lock()
        self._first: Engine | None = None
        self._first_in_use = False
        self._connections: dict[asyncio.AbstractEventLoop, LoopConnection] = {}
        #: The connection used last; most programs have only one.
        self._latest: LoopConnection | None = None
        on_fork(self)

    def after_fork(self) -> None:
        """Reset in a child process: connections and lock belong to the parent.

        The first use opens the stores again.
        """
        self._lock = threading.Lock()
        leave_to_parent((self._connections, self._first))
        self._connections = {}
        self._latest = None
        if self._first_in_use and self._first is not None:
            self._first = self._first.clone()
            self._first_in_use = False

    @property
    def in_use(self) -> bool:
        """Whether an event loop that is not closed has an engine."""
        return any(not loop.is_closed() for loop in self._connections)

    def discard(self) -> None:
        """Close all connections from outside their event loops, running or closed. For temporary stores."""
        with self._lock:
            connections, self._connections, self._latest = list(self._connections.values()), {}, None
        _discard(connections)

    def engine(self) -> Engine:
        """The engine of the running loop, open or not; without a running loop, the first engine."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            with self._lock:
                return self._first_engine()
        return self._connection(loop).engine

    def ledger(self) -> Ledger | None:
        """The ledger of the running loop, open or not."""
        return self._connection(_running_loop()).ledger

    def ledger_refusal(self) -> LedgerRefused | None:
        """Why the ledger of the running loop refused the login when it was opened; None if it did not."""
        return self._connection(_running_loop()).refusal

    def outbox(self) -> OutboxHandle | None:
        """The outbox of the running loop, open or not."""
        return self._connection(_running_loop()).outbox()

    async def prepare(self, envelopes: Sequence[Envelope]) -> list[Envelope]:
        """Check envelopes and let the guards review them, without submitting."""
        return await self._connection(_running_loop()).prepare(envelopes)

    async def open(self) -> None:
        """Open the engine of this loop, and its ledger if it is reachable. Can be repeated."""
        await self._connection(_running_loop()).open(_OPEN_TIMEOUT_S)

    async def submitter(self) -> Submitter:
        """The submitter of this loop, opened if necessary; in inline mode, that of inline mode."""
        if self.inline_submitter is not None:
            return self.inline_submitter
        loop, connection = _running_loop(), self._latest
        if connection is None or connection.loop is not loop:
            connection = self._latest = self._connection(loop)
        try:
            if connection.submitter is None:
                connection.submitter = self._front(connection._batching or await connection.open())
            return connection.submitter
        except EngineUnavailable as exc:
            _log.critical("cannot reach the engine, submission fails: %s", exc)
            raise

    async def close(self) -> None:
        """Close engine and ledger of this loop; the next use creates new ones."""
        if is_inside_parents_loop():
            return
        with self._lock:
            connection = self._connections.pop(asyncio.get_running_loop(), None)
            self._latest = None
        if connection is not None:
            await connection.close()

    def _connection(self, loop: asyncio.AbstractEventLoop) -> LoopConnection:
        with self._lock:
            connection = self._connections.get(loop)
            if connection is None:
                gone = [self._connections.pop(other) for other in list(self._connections) if other.is_closed()]
                if self._temporary:
                    # Others cannot be closed: their connections belong to a closed event loop.
                    _discard(gone)
                engine = self._next_engine()
                ledger = self._build_ledger(engine)
                guards = self._build_guards(ledger)
                webhook_policy = self._build_webhook_policy(ledger)
                connection = self._connections[loop] = LoopConnection(
                    loop,
                    engine,
                    ledger,
                    guards,
                    webhook_policy,
                    self._durable_timeout_s,
                    self._build_outbox,
                    self._opens_after_s,
                )
            return connection

    def _next_engine(self) -> Engine:
        # The first engine serves the first loop; every further loop gets a clone on the same store.
        in_use = self._first_in_use
        self._first_in_use = True
        first = self._first_engine()
        return first.clone() if in_use else first

    def _first_engine(self) -> Engine:
        if self._first is None:
            self._first = self._build()
        return self._first


_WAIT_MS: Final = 1_000
_CAUGHT_UP_S: Final = 30.0


class LedgerClient:
    """Queries of the ledger, and waiting for it. Every method raises `InvalidOption` if the app has none."""

    def __init__(self, engine: Callable[[], InspectionPort], ledger: Callable[[], LedgerReadPort | None]) -> None:
        self._engine = engine
        self._ledger = ledger

    @property
    def queries(self) -> Queries:
        """Jobs, histories and counts in the ledger."""
        return self._require_ledger().queries

    async def wait_caught_up(self, timeout: Duration = _CAUGHT_UP_S) -> None:
        """Wait until the ledger has everything that is in the engine's feeds now.

        Returns immediately in embedded mode. Raises `LedgerUnavailable` with the reason after `timeout`.
        """
        deadline = time.monotonic() + duration_ms(timeout, "timeout") / 1000
        engine, ledger = self._engine(), self._require_ledger()
        projection = ledger.projection
        if projection is None:
            return
        for queue in await engine.queues():
            await _wait(projection, queue, await engine.snapshot(queue, []), deadline)

    def _require_ledger(self) -> LedgerReadPort:
        ledger = self._ledger()
        if ledger is None:
            raise InvalidOption("this app has no ledger; set HOLDFAST_LEDGER to postgresql://… or sqlite:///ledger.db")
        return ledger


async def _wait(projection: ProjectionReadPort, queue: str, end: EngineSnapshot, deadline: float) -> None:
    """Wait until the ledger has the feed's last entry.

    The nonce is checked too, since positions of two feeds cannot be compared.
    """
    if not end.position:
        return
    last = FeedEntry(end.position, end.nonce, [])
    at: FeedPosition | None = None
    outage: LedgerUnavailable | None = None
    while True:
        left_ms = round((deadline - time.monotonic()) * 1000)
        try:
            # The position is read before the entry: a move in between ends the wait immediately.
            at = await projection.position(queue)
            if (at.position, at.nonce) == (end.position, end.nonce):
                # An entry without events is not stored, only passed.
                return
            if end.position in await projection.already_written(queue, [last]):
                return
            if left_ms <= 0:
                raise _behind(queue, at, end)
            outage = None
            await projection.wait_position_change(queue, at, min(left_ms, _WAIT_MS))
        except LedgerUnavailable as exc:
            if left_ms <= 0:
                raise outage or exc from None
            outage = exc
            await asyncio.sleep(min(left_ms / 1000, 0.1))


def _behind(queue: str, at: FeedPosition, end: EngineSnapshot) -> LedgerUnavailable:
    reached = f"is at {at.position}" if at.position else "has nothing"
    return LedgerUnavailable(
        f"the ledger answers, but {reached} of queue {queue}'s feed, which ends at {end.position}; "
        "check that a worker of that queue or `holdfast upkeep` runs"
    )
