"""Names of runs: what a run writes has its name in it, so that nothing else is ever touched or removed.

A name tells when its run began. What a killed run has left is removed by the next one, once it is an hour old: by then
its run, which takes a minute at most, is over.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

PREFIX: Final = "holdfast-verify-"
#: Who began earlier than this has ended, or was killed.
OLD_MS: Final = 3_600_000

_NAME: Final = re.compile(r"holdfast[-_]verify[-_]([0-9a-f]{11})[-_][0-9a-f]{8}")


def new_name(now_ms: int) -> str:
    """A name that no other run has."""
    return f"{PREFIX}{now_ms:011x}-{secrets.token_hex(4)}"


def schema_of(name: str) -> str:
    """The run's schema in PostgreSQL."""
    return name.replace("-", "_")


def is_left_over(name: str, now_ms: int) -> bool:
    """Whether it is the name of a run that cannot be under way any more."""
    found = _NAME.fullmatch(name)
    return found is not None and int(found[1], 16) < now_ms - OLD_MS
