"""How the function of an effect is run."""

from __future__ import annotations

import asyncio
import threading

import pytest

from holdfast.effects.functions import call_function


async def test_a_thread_that_ends_as_its_run_is_cancelled_is_heard() -> None:
    told: list[str] = []
    running = asyncio.create_task(call_function(lambda: "done", (), {}, late=told.append))
    await asyncio.sleep(0)
    # The loop stands still until the thread has ended: its result and the cancellation come in one turn, in this order.
    for thread in threading.enumerate():
        if thread.name == "holdfast-effect":
            thread.join()
    asyncio.get_running_loop().call_soon(running.cancel)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert told == ["done"]
