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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn


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

        return asyncio.run(play(Path(folder)))


def _end(number: int, _: Any) -> NoReturn:
    """Leave by an exception, so that the workers are ended on the way."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main())
