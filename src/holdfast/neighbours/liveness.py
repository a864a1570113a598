"""Whether the process of a record still runs.

`DEAD` is certain: leases are reclaimed on it. Whatever leaves a doubt is `UNKNOWN`, and the lease decides.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from holdfast.neighbours.host import PROC, Host, has_live_thread, read_stat

Kill = Callable[[int, int], None]


class Liveness(StrEnum):
    """What is known about a process."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


def check_liveness(
    pid: int, started_at: int, host: Host, own: Host | None, *, proc: Path = PROC, kill: Kill = os.kill
) -> Liveness:
    """Judge the process that had this pid and start time on `host`; `own` is the host of this process."""
    if own is None or host != own or pid < 1:
        return Liveness.UNKNOWN
    try:
        kill(pid, 0)
    except ProcessLookupError:
        return Liveness.DEAD
    except PermissionError:
        # It exists, under another user.
        pass
    except (OSError, OverflowError):
        return Liveness.UNKNOWN
    stat = read_stat(pid, proc)
    if stat is None:
        # It has ended since, or /proc hides it.
        return Liveness.UNKNOWN
    if stat.started_at != started_at:
        return Liveness.DEAD
    # The first thread may end before the others.
    if stat.has_ended and not has_live_thread(pid, proc):
        return Liveness.DEAD
    return Liveness.ALIVE
