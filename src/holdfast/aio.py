"""Helpers for asyncio, threads and TCP servers that do not depend on jobs.

- `is_own_cancellation`, `raise_if_cancelled`: distinguish a cancellation of the current task from a `CancelledError`
  that a library or the user's function raised.
- `LoopThread`: a coroutine in its own thread with its own event loop, for work that must not wait for user code, nor
  user code for it (renewing leases, projecting).
- `serve_tcp`: a TCP server for the duration of a block; nothing of it remains afterwards.
- `BlockingPortal`: an event loop in a thread for callers without one (Django views, scripts, threads). One per app,
  started with the first blocking call; a process forked after that gets a new one.
- `DaemonThreads`: threads for functions that are not `async`. The standard executor joins its threads at interpreter
  exit, so that one function that never returns would keep a drained worker alive.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import Any, Final, Protocol, TypeVar

from holdfast.after_fork import leave_to_parent, on_fork
from holdfast.errors import UsageError


def is_own_cancellation(exc: BaseException) -> bool:
    """Whether the error is a cancellation of the current task, which has to end then."""
    task = asyncio.current_task()
    return isinstance(exc, asyncio.CancelledError) and (task is None or task.cancelling() > 0)


def raise_if_cancelled() -> None:
    """Raise `CancelledError` if the current task is being cancelled.

    For loops around libraries that may have swallowed the cancellation.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


_log: Final = logging.getLogger("holdfast.aio")


class LoopThread:
    """A daemon thread with an event loop: `start`, then `stop`, both from one other event loop."""

    def __init__(
        self,
        name: str,
        live: Callable[[], Coroutine[Any, Any, None]],
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    ) -> None:
        """`live` is cancelled by `stop`, and must then end."""
        self._live = live
        self._loop_factory = loop_factory
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        #: Whether `stop` was called. Check it where a cancellation may come too early to be noticed.
        self.stopping = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def stop(self) -> None:
        """Cancel `live` and join the thread."""
        self.stopping = True
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._cancel)
            except RuntimeError:
                # The thread has just ended by itself.
                _log.debug("%s: loop already closed", self._thread.name)
        await asyncio.to_thread(self._thread.join)

    # In the thread itself -----------------------------------------------------------------

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=self._loop_factory) as runner:
            self._loop = runner.get_loop()
            try:
                runner.run(self._run())
            except asyncio.CancelledError:
                _log.debug("%s ended", self._thread.name)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        self._task = asyncio.current_task()
        await self._live()


#: Passes of asyncio's loop from accepting a connection until its task has begun. A closed server does not close a
#: connection whose task has not begun.
_ACCEPT_PASSES: Final = 4

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Socket(Protocol):
    """A listening socket."""

    def fileno(self) -> int: ...


async def stop_accepting(sockets: Iterable[Socket]) -> None:
    """Accept no further connections, and wait until the tasks of accepted ones have begun.

    Call it before closing a server.
    """
    for sock in sockets:
        asyncio.get_running_loop().remove_reader(sock.fileno())
    for _ in range(_ACCEPT_PASSES):
        await asyncio.sleep(0)


@asynccontextmanager
async def serve_tcp(serve: Serve, host: str, port: int = 0, *, limit: int = 2**16) -> AsyncIterator[int]:
    """Run `serve` for each connection until the block ends; yields the port (0 selects a free one).

    A connection is closed when its `serve` returns; those that are still open at the end are aborted.
    """
    connections: set[asyncio.Task[None]] = set()

    async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await serve(reader, writer)
            writer.close()
        except asyncio.CancelledError:
            # The end of the block. asyncio would report the cancellation of a task that is not awaited as an error.
            pass
        finally:
            if not writer.is_closing():
                writer.transport.abort()
            connections.discard(task)

    server = await asyncio.start_server(begin, host, port, limit=limit)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        await stop_accepting(server.sockets)
        server.close()
        remaining = list(connections)
        for connection in remaining:
            connection.cancel()
        await asyncio.gather(*remaining, return_exceptions=True)
        # An aborted transport closes its socket in the next pass of the loop.
        await asyncio.sleep(0)


T = TypeVar("T")


class BlockingPortal:
    """Runs coroutines for callers that block until they are done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        on_fork(self)

    def after_fork(self) -> None:
        """Reset in a child process: threads do not survive a fork, and one of them may have held the lock."""
        self._lock = threading.Lock()
        leave_to_parent((self._loop, self._thread))
        self._loop = self._thread = None

    @property
    def is_open(self) -> bool:
        """Whether its thread runs in this process."""
        return self._loop is not None

    def call(self, what: str, make: Callable[[], Coroutine[Any, Any, T]], instead: str) -> T:
        """Return the result of `make()`; raises `UsageError` where blocking would stop a running event loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            future = asyncio.run_coroutine_threadsafe(make(), self._open())
        else:
            raise UsageError(f"{what} would block the running event loop; use `{instead}`")
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `last` on the portal's loop, then end its thread. Does nothing if it was never opened."""
        if not self.is_open:
            return
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(last(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    def _open(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name="holdfast-portal", daemon=True)
                self._thread.start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


Work = Callable[[], None]


class DaemonThreads:
    """One thread per concurrent work item; idle threads are reused. The caller bounds the work."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._count = 0

    def start(self, work: Work) -> None:
        """Run `work` in a thread immediately. It must not raise."""
        self._work.put(work)
        with self._lock:
            if self._idle:
                self._idle -= 1
                return
            self._count += 1
            number = self._count
        threading.Thread(target=self._serve, name=f"{self._name}-{number}", daemon=True).start()

    def close(self) -> None:
        """Let idle threads end; busy ones end after their work."""
        for _ in range(self._count):
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            # Not kept while waiting: it references the job's arguments.
            del work
            with self._lock:
                self._idle += 1
