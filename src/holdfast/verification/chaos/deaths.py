"""Workers that other processes have found dead, according to the logs of a deployment.

The leases of these workers expire at once, so each of them must have ended: by a fault, or by the job that it ran.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from holdfast.identity import parse_identity

_MESSAGE: Final = re.compile(r"worker (\S+) has ended without a drain; its (\d+) leases expire now")


class Death(msgspec.Struct, frozen=True):
    """A worker whose leases another process has let expire."""

    pid: int
    leases: int
    #: Wall clock time.
    at: float


def deaths(folder: Path) -> list[Death]:
    """All deaths in the logs of this folder. One worker may be listed by several processes."""
    return [death for log in sorted(folder.glob("*.log")) for death in _deaths_in(log)]


def _deaths_in(log: Path) -> Iterator[Death]:
    for line in log.read_text(errors="replace").splitlines():
        found = _MESSAGE.search(line)
        worker = None if found is None else parse_identity(found[1])
        if found is not None and worker is not None:
            at = datetime.fromisoformat(msgspec.json.decode(line)["time"]).timestamp()
            yield Death(worker.pid, int(found[2]), at)
