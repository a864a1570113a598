"""Calls of the function of an effect."""

from __future__ import annotations

import asyncio
import threading

import pytest

from holdfast.effects.functions import call_function


async def test_the_result_of_a_thread_that_ends_during_cancellation_is_reported() -> None:
    late_results: list[str] = []
    running = asyncio.create_task(call_function(lambda: "done", (), {}, late=late_results.append))
    await asyncio.sleep(0)
    # Blocks the loop until the thread has ended, so that one pass handles its result and then the cancellation.
    for thread in threading.enumerate():
        if thread.name == "holdfast-effect":
            thread.join()
    asyncio.get_running_loop().call_soon(running.cancel)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert late_results == ["done"]
