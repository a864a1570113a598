"""A cancellation that a library swallows is obeyed all the same."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from holdfast.upkeep.loop import run_forever


async def test_a_loop_ends_although_a_library_makes_something_else_of_the_cancellation() -> None:
    began = asyncio.Event()

    async def turn() -> float:
        began.set()
        # As a driver does that is interrupted in the middle of a call.
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        # A cancellation that was noticed only after the pause would keep its process for minutes.
        return 300.0

    loop = asyncio.create_task(run_forever("turning", turn))
    await began.wait()
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(loop, 5)
