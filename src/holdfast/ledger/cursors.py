"""Cursors: places in a list as text that callers hand back and do not look into.

An instant in microseconds and the names that come after it in the order, as hexadecimal UTF-8. Every text of that shape
is a place, be it one where nothing stands: so the shape is all that there is to be checked, and a pattern says it all.
"""

from __future__ import annotations

import re
from typing import Final

from holdfast.errors import UsageError
from holdfast.ledger.text import decoded

#: Until the year 2286.
_INSTANT: Final = "[0-9]{1,16}"
_NAME: Final = "-([0-9a-f]{2})*"


def pattern_of(names: int) -> str:
    """The shape of a cursor with so many names."""
    return f"^{_INSTANT}({_NAME}){{{names}}}$"


def written(instant_us: int, *names: str) -> str:
    """A place as text."""
    return "-".join((str(instant_us), *(name.encode("utf-8", "surrogatepass").hex() for name in names)))


def read(cursor: str, names: int) -> tuple[int, list[str]]:
    """The place again. Raises `UsageError` for what is no cursor."""
    if not re.fullmatch(pattern_of(names), cursor):
        raise UsageError(f"{cursor[:80]!r} is no cursor of a list; take it from the page before")
    instant, *encoded = cursor.split("-")
    return int(instant), [decoded(bytes.fromhex(name)) for name in encoded]
