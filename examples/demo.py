"""holdfast in half a minute: a few hundred jobs on one SQLite file, two workers, one of them killed with -9, and two
people, one of whom approves a refund while it takes both to throw a dead letter away.

Plays the story of `orders.py` (`demo_story.py`), then compares every job with what should have become of it
(`demo_check.py`). Exits 0 only if all of them ended exactly as they should.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def main() -> int:
    with TemporaryDirectory(prefix="holdfast-demo-") as folder:
        os.environ.update(
            HOLDFAST_URL=f"sqlite:///{folder}/demo.db",
            # Short leases, so that a killed worker's job comes back while you watch.
            HOLDFAST_VISIBILITY_TIMEOUT_S="3",
            HOLDFAST_HEARTBEAT_INTERVAL_S="1",
            HOLDFAST_RECLAIM_INTERVAL_S="0.5",
        )
        # Only now: `orders.py` reads the settings when it is imported, and so do the workers.
        from demo_story import play

        return asyncio.run(_until_ended(play(Path(folder))))


async def _until_ended(story: Coroutine[Any, Any, int]) -> int:
    """The story's result, or the code of an end by SIGTERM. That comes between two steps of the story: in the middle of
    a worker's start it would leave that worker behind."""
    telling = asyncio.create_task(story)
    ended: list[int] = []

    def end() -> None:
        ended.append(signal.SIGTERM)
        telling.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    try:
        return await telling
    except asyncio.CancelledError:
        if not ended:
            raise
        return 128 + ended[0]


if __name__ == "__main__":
    sys.exit(main())
