"""A cancellation that a library swallows still ends a loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest

from holdfast.core.announcement import AnnouncedTask
from holdfast.upkeep.loop import run_forever
from holdfast.worker.announcer import run_announcer


async def test_a_loop_ends_although_a_library_swallows_the_cancellation() -> None:
    started = asyncio.Event()

    async def run_once() -> float:
        started.set()
        # As a driver does when it is interrupted in the middle of a call.
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        # A cancellation noticed only after this pause would delay the exit by minutes.
        return 300.0

    loop = asyncio.create_task(run_forever("test", run_once))
    await started.wait()
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(loop, 5)


async def test_announcements_end_although_a_library_swallows_the_cancellation() -> None:
    started = asyncio.Event()

    class Store:
        async def announce_tasks(self, tasks: Sequence[AnnouncedTask]) -> None:
            started.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    task = AnnouncedTask(task="t", queue="q", fingerprint="01")
    announcer = asyncio.create_task(run_announcer(Store(), [task], lambda: None))
    await started.wait()
    announcer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(announcer, 30)
