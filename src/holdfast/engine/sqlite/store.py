"""One engine's hold on a file: the shared writer, a reader of its own, and who waits for news."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from holdfast.engine.sqlite.reader import Reader
from holdfast.engine.sqlite.transaction import Effects, json_list
from holdfast.engine.sqlite.waiting import Waiters
from holdfast.engine.sqlite.writer import Subscriber, Writer
from holdfast.engine.sqlite.writers import acquire, release
from holdfast.errors import EngineUnavailable, InvalidOption

T = TypeVar("T")

_PAIRS: Final = msgspec.json.Decoder(list[tuple[str, str]])


class Place:
    """Where a database is; a temporary one goes when nobody refers to it any more."""

    def __init__(self, path: str) -> None:
        self.temporary = path in ("", ":memory:")
        if self.temporary:
            directory = tempfile.mkdtemp(prefix="holdfast-")
            self.path = Path(directory) / "temporary.db"
            weakref.finalize(self, _remove, directory, os.getpid())
        elif "\0" in path:
            raise InvalidOption(f"{path!r} is no path")
        else:
            self.path = Path(path).resolve()


def _remove(directory: str, owner: int) -> None:
    # A forked child that ends must not take its parent's database with it.
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


class Store:
    """Opened and used on one event loop."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._writer: Writer | None = None
        self._reader: Reader | None = None
        self._subscriber: Subscriber | None = None
        self._checking: asyncio.Task[None] | None = None
        self.waiters = Waiters(self._watch)

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    async def open(self) -> None:
        """Raises `EngineUnavailable` if the file cannot be used, `InvalidOption` if it is not ours."""
        if self.is_open:
            return
        writer = await asyncio.to_thread(acquire, self.place.path, durable=not self.place.temporary)
        await self._settle_in(writer)

    async def _settle_in(self, writer: Writer) -> None:
        if self._writer is not None:
            # Two tasks opened it at once.
            await asyncio.to_thread(release, writer)
            return
        self._subscriber = Subscriber(asyncio.get_running_loop(), self._tell)
        writer.subscribe(self._subscriber)
        self._reader = Reader(self.place.path)
        self._writer = writer

    async def close(self) -> None:
        """Safe to call twice. Whoever still waits is told that it is closed."""
        writer, reader, subscriber = self._writer, self._reader, self._subscriber
        if writer is None or reader is None or subscriber is None:
            return
        self._writer = self._reader = None
        writer.unsubscribe(subscriber)
        self.waiters.wake_all()
        if self._checking is not None:
            self._checking.cancel()
            with suppress(asyncio.CancelledError):
                await self._checking
        await reader.close()
        await asyncio.to_thread(release, writer)

    @property
    def reader(self) -> Reader:
        if self._reader is None:
            raise _closed()
        return self._reader

    async def write(self, work: Callable[..., T], *arguments: Any, lazy: bool = False) -> T:
        """Run a step in the writer's transaction; its result, once that is committed."""
        if self._writer is None:
            raise _closed()
        return await self._writer.perform(work, *arguments, lazy=lazy)

    # News ------------------------------------------------------------------------------------------

    def _watch(self, change: int) -> None:
        if self._writer is not None and self._subscriber is not None:
            self._writer.watch(self._subscriber, change)

    def _tell(self, effects: Effects) -> None:
        self.waiters.tell(effects)
        if effects.foreign and self._checking is None and self.waiters.jobs():
            self._checking = asyncio.get_running_loop().create_task(self._check_ends())
            self._checking.add_done_callback(self._checked)

    async def _check_ends(self) -> None:
        """Another process wrote: one question for all who wait for the end of a job, however many they are."""
        jobs = self.waiters.jobs()
        ended = await self.reader.rows("final", _PAIRS, pairs=json_list(jobs))
        self.waiters.tell(Effects(ended=ended))

    def _checked(self, task: asyncio.Task[None]) -> None:
        self._checking = None
        if not task.cancelled() and task.exception() is not None:
            # They will look for themselves, and get the error themselves.
            self.waiters.tell(Effects(ended=self.waiters.jobs()))


def _closed() -> EngineUnavailable:
    return EngineUnavailable("the engine is not open; await its open() first")
