"""When a worker ends by itself: it has run enough jobs, or its process uses too much memory."""

from __future__ import annotations

import os
import resource
import sys
from enum import StrEnum
from pathlib import Path
from typing import Final

from holdfast.errors import InvalidOption

_STATM: Final = Path("/proc/self/statm")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class WorkerExit(StrEnum):
    """Why a worker ended."""

    DRAINED = "drained"
    #: It has run `max_jobs` jobs.
    MAX_JOBS = "max_jobs"
    #: Its process uses more memory than `max_rss`.
    MAX_RSS = "max_rss"
    #: Another process has its id.
    REPLACED = "replaced"


class RecycleLimits:
    """The limits of jobs and of memory (bytes) at which a worker drains itself; None: no limit."""

    def __init__(self, max_jobs: int | None, max_rss: int | None) -> None:
        for limit, value in (("max_jobs", max_jobs), ("max_rss", max_rss)):
            if value is not None and value < 1:
                raise InvalidOption(f"{limit} must be 1 or more, got {value!r}")
        self.max_jobs = max_jobs
        self.max_rss = max_rss

    def find_reached(self, finished: int) -> WorkerExit | None:
        """The limit that is reached, given the number of finished jobs."""
        if self.max_jobs is not None and finished >= self.max_jobs:
            return WorkerExit.MAX_JOBS
        if self.max_rss is not None and _resident_bytes() > self.max_rss:
            return WorkerExit.MAX_RSS
        return None


def _resident_bytes() -> int:
    """Current resident set size; on systems without /proc, its peak."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
