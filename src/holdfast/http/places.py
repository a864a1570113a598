"""Places in a stream of events: how far each queue's feed had been told. The same in every process that serves it.

As text, which is an event's id: `queue=position;queue=position;…`, names quoted, the event's own queue first with the
event's number within its entry after a dot. Positions are numbers, joined as the engine likes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, unquote

#: Comparable: the entry's numbers, then the event's number within it.
Position = tuple[int, ...]
#: Before everything.
NOWHERE: Final[Position] = ()
_WHOLE: Final = 1 << 62


def parsed(position: str) -> Position:
    """A position as text, to be compared. Without a number within its entry it stands behind all of that."""
    entry, _, index = position.partition(".")
    return (*(int(number) for number in entry.split("-")), int(index) if index else _WHOLE)


def before(position: str) -> Position:
    """Just before an entry."""
    return (*parsed(position)[:-1], -1)


def entry_of(position: str) -> str:
    """The position of the entry that an event is in."""
    return position.partition(".")[0]


def as_text(queue: str, position: str, others: Mapping[str, str]) -> str:
    """The id of an event at `position` of `queue`, when the other feeds had been told up to `others`."""
    rest = (f"{quote(name, safe='')}={at}" for name, at in others.items() if at and name != queue)
    return ";".join((f"{quote(queue, safe='')}={position}", *rest))


def everywhere(positions: Mapping[str, str]) -> str:
    """The place behind all that has been told."""
    return ";".join(f"{quote(name, safe='')}={at}" for name, at in positions.items() if at)


def from_text(text: str) -> dict[str, str] | None:
    """Queue → position; None for what is no event's id."""
    try:
        pairs = [part.split("=") for part in text.split(";")]
        place = {unquote(name, errors="strict"): position for name, position in pairs}
        for position in place.values():
            parsed(position)
    except ValueError:
        return None
    return place
