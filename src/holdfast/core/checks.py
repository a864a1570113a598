"""What names, keys and trace ids may be."""

from __future__ import annotations

from typing import Final

from holdfast.errors import InvalidOption

#: In bytes of UTF-8: all of a job's names together must fit a row of an index, which has 2,704 bytes on PostgreSQL.
NAME_LIMIT: Final = 200
KEY_LIMIT: Final = 1_000


def check_name(name: object, what: str) -> str:
    """A name for a queue, a task or a tenant: it becomes part of keys, so it must be short and plain."""
    if not isinstance(name, str) or not name:
        raise InvalidOption(f"{what} must be a name that is not empty, got {name!r}")
    # Braces would move a queue's keys to another slot of a Redis Cluster.
    if not name.isprintable() or any(character in " {}" for character in name):
        raise InvalidOption(f"{what} {name!r} must have no blanks, braces or control characters")
    check_length(name, NAME_LIMIT, what)
    return name


def check_text(text: object, what: str) -> str:
    """A key or a trace id: any text, not empty, not too long. None given: empty."""
    if text is None:
        return ""
    if not isinstance(text, str) or not text:
        raise InvalidOption(f"{what} must be a text that is not empty, got {text!r}")
    if "\x00" in text or not _is_unicode(text):
        raise InvalidOption(f"{what} {text!r} must have no zero bytes and no half characters (lone surrogates)")
    check_length(text, KEY_LIMIT, what)
    return text


def check_length(text: str, limit: int, what: str) -> None:
    """Raises `InvalidOption` for a text of more bytes than a ledger can look up."""
    size = len(text.encode())
    if size > limit:
        raise InvalidOption(f"{what} has {size} bytes of UTF-8, the limit is {limit}")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
