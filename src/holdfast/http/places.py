"""Places in a stream of events: how far each queue's feed had been told. The same in every process that serves it.

As text, which is an event's id: `queue=position;queue=position;…`, names quoted, the event's own queue first with the
event's number within its entry after a dot. Positions are numbers, joined as the engine likes.

That names every queue and tells how far it has come. Who is not of every tenant gets the same under a `Cover`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, unquote

#: Comparable: the entry's numbers, then the event's number within it.
Position = tuple[int, ...]
#: Before everything.
NOWHERE: Final[Position] = ()
_WHOLE: Final = 1 << 62
_TAG: Final = 16
#: Texts are filled up to a multiple of it: their length must not count queues.
_BLOCK: Final = 96


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


class Cover:
    """Makes a place unreadable for whoever gets it, and knows it again when it comes back, in every process that has
    the same key. What was made up, or changed, is not taken."""

    def __init__(self, key: bytes) -> None:
        self._tag_key = hmac.digest(key, b"holdfast.place.tag", "sha256")
        self._text_key = hmac.digest(key, b"holdfast.place.text", "sha256")

    def hide(self, place: str) -> str:
        """The place, covered; the same one always looks the same."""
        text = place.encode()
        text += b" " * (-len(text) % _BLOCK)
        tag = self._tag(text)
        return base64.urlsafe_b64encode(tag + self._turned(tag, text)).decode()

    def show(self, covered: str) -> str | None:
        """The place; None if this is none that was covered with our key."""
        try:
            raw = base64.urlsafe_b64decode(covered.encode())
        except (binascii.Error, ValueError):
            return None
        tag, text = raw[:_TAG], self._turned(raw[:_TAG], raw[_TAG:])
        return text.decode().rstrip() if hmac.compare_digest(tag, self._tag(text)) else None

    def _tag(self, text: bytes) -> bytes:
        return hmac.digest(self._tag_key, text, "sha256")[:_TAG]

    def _turned(self, tag: bytes, text: bytes) -> bytes:
        """With a key stream of its own for every text, since its tag is one: there and back."""
        stream = hashlib.shake_256(self._text_key + tag).digest(len(text))
        return bytes(one ^ other for one, other in zip(text, stream, strict=True))
