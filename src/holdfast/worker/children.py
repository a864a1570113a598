"""Child processes for `process=True`: reused while they behave, killed when their job is over from outside.

A child is a fresh interpreter (never a fork of this one) at the other end of a socket pair. The pool
kills only children that it started itself, through the handle that the operating system gave for them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from holdfast.core.job import Claim
from holdfast.core.verdict import Outcome
from holdfast.worker.child import HEADER, Order, Reply
from holdfast.worker.classify import process_died
from holdfast.worker.locate import Place, locate
from holdfast.worker.plan import Plan

#: More children than this only compete for the cores; further jobs wait, each with its slot.
MAX_CHILDREN: Final = max(4, 2 * (os.cpu_count() or 1))
_REAP_S: Final = 5.0

_MAIN: Final = "import sys; sys.path[:] = {path!r}; from holdfast.worker.child import main; main({descriptor})"

#: For apps whose code names no URL; others are moved once they are loaded.
_IN_MEMORY: Final = {"HOLDFAST_URL": "sqlite://"}

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Reply).decode


class Children:
    """A pool of child processes. One event loop."""

    def __init__(self, limit: int = MAX_CHILDREN, *, in_memory: bool = False) -> None:
        """`in_memory`: the worker's app is, and children must not reach the stores that it is configured for."""
        self._in_memory = in_memory
        self._room = asyncio.Semaphore(limit)
        self._idle: list[Child] = []
        self._all: set[Child] = set()
        self._places: dict[str, Place] = {}

    async def perform(self, plan: Plan, claim: Claim, started: Callable[[], None]) -> Outcome:
        """Run one job in a child; `started` is called when its code begins. A cancelled call kills its child."""
        place = self._places.get(plan.name) or self._places.setdefault(plan.name, locate(plan))
        order = _encode(Order(place, claim, self._in_memory))
        async with self._room:
            while True:
                child, fresh = await self._take()
                try:
                    await child.order(order)
                    started()
                    reply = await child.answer()
                except (EOFError, OSError):
                    exit_code = await self._bury(child)
                    if fresh or child.started:
                        return process_died(exit_code)
                    # It had died at rest: that is not this job's doing.
                except GeneratorExit:
                    # Thrown away: there is no waiting any more.
                    child.kill()
                    raise
                except BaseException:
                    # Dead before the verdict is given: the next attempt must not meet it.
                    await self._bury(child)
                    raise
                else:
                    self._idle.append(child)
                    return _decode(reply).outcome()

    async def close(self) -> None:
        """End all children and wait for them."""
        children, self._all, self._idle = self._all, set(), []
        for child in children:
            child.kill()
        for child in children:
            await child.reap()

    async def _take(self) -> tuple[Child, bool]:
        """A child at rest, or a new one."""
        if self._idle:
            return self._idle.pop(), False
        child = await Child.spawn(_IN_MEMORY if self._in_memory else {})
        self._all.add(child)
        return child, True

    async def _bury(self, child: Child) -> int | None:
        child.kill()
        exit_code = await child.reap()
        self._all.discard(child)
        return exit_code


class Child:
    """One child process and our end of its socket."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.pid = process.pid
        #: Whether the code of its latest job was reached.
        self.started = False

    @classmethod
    async def spawn(cls, variables: Mapping[str, str]) -> Child:
        """Start one. It imports the user's code with its first job."""
        ours, theirs = socket.socketpair()
        with theirs:
            code = _MAIN.format(path=sys.path, descriptor=theirs.fileno())
            process = subprocess.Popen(  # noqa: ASYNC220 - a few milliseconds, once per child
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **variables},
            )
        try:
            return cls(process, *await asyncio.open_connection(sock=ours))
        except BaseException:
            process.kill()
            process.wait()
            raise

    async def order(self, order: bytes) -> None:
        """Hand over a job; returns when the child has imported what it needs. `EOFError` or `OSError`: it died."""
        self.started = False
        self._writer.write(HEADER.pack(len(order)) + order)
        await self._writer.drain()
        await self.answer()
        self.started = True

    async def answer(self) -> bytes:
        """Its next message: empty at the start of a job, then the outcome. `EOFError` or `OSError`: it died."""
        header = await self._reader.readexactly(HEADER.size)
        return await self._reader.readexactly(HEADER.unpack(header)[0])

    def kill(self) -> None:
        """End it now. Safe to call twice, and after it has ended."""
        self._writer.close()
        self._process.kill()

    async def reap(self) -> int | None:
        """Wait for a killed child; its exit code, negative for a signal."""
        try:
            return await asyncio.to_thread(self._process.wait, _REAP_S)
        except subprocess.TimeoutExpired:
            return None
