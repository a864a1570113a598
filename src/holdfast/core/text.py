"""Limits for names, keys and nesting, storable text, and error fingerprints. Pure.

PostgreSQL accepts neither NUL nor lone surrogates in text. `clean` and `decode_text` replace them, so that one bad text
does not stop the projection of all others. Dead letters with the same kind of error have the same `error_fingerprint`.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final, overload

from holdfast.core.job import Failure
from holdfast.errors import InvalidOption

#: In bytes of UTF-8: all of a job's names together must fit a PostgreSQL index row, which has 2,704 bytes.
NAME_LIMIT: Final = 200
KEY_LIMIT: Final = 1_000
#: Deepest nesting of JSON in a message. Far below the recursion limit, so that every later step can process it.
MESSAGE_DEPTH: Final = 200
#: Also matches an unterminated string, so that no quote inside it starts another: linear time.
_STRINGS: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


def check_name(name: object, what: str) -> str:
    """Check the name of a queue, a task or a tenant: short and printable, since it is part of keys."""
    if not isinstance(name, str) or not name:
        raise InvalidOption(f"{what} must be a non-empty name, got {name!r}")
    # Braces would move a queue's keys to another slot of a Redis Cluster.
    if not name.isprintable() or any(character in " {}" for character in name):
        raise InvalidOption(f"{what} {name!r} must not contain spaces, braces or control characters")
    check_length(name, NAME_LIMIT, what)
    return name


def check_text(text: object, what: str) -> str:
    """Check a key or a trace id: any text, not empty, not too long. Returns '' for None."""
    if text is None:
        return ""
    if not isinstance(text, str) or not text:
        raise InvalidOption(f"{what} must be a non-empty text, got {text!r}")
    if "\x00" in text or not _is_unicode(text):
        raise InvalidOption(f"{what} {text!r} must not contain zero bytes or lone surrogates")
    check_length(text, KEY_LIMIT, what)
    return text


def check_length(text: str, limit: int, what: str) -> None:
    """Raise `InvalidOption` for a text of more bytes than a ledger can index."""
    size = len(text.encode())
    if size > limit:
        raise InvalidOption(f"{what} has {size} bytes of UTF-8, the limit is {limit}")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


#: Parts that differ between failures of the same kind: quoted words, ids, numbers.
_VARYING: Final = re.compile(r"'[^']*'|\"[^\"]*\"|\b0x[0-9a-f]+\b|\b[0-9a-f]{8,}\b|\d+", re.IGNORECASE)


def error_fingerprint(task: str, failure: Failure) -> str:
    """Hash of task, code, exception type and message without its varying parts, in 16 hex digits."""
    kind = _VARYING.sub("*", failure.message.partition("\n")[0])[:500]
    text = f"{task}\x00{failure.code}\x00{failure.type}\x00{kind}"
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def too_deep(encoded: bytes, levels: int) -> bool:
    """Whether JSON is nested deeper than `levels`. Every pass removes the innermost pairs of brackets."""
    if encoded.count(b"[") + encoded.count(b"{") <= levels:
        return False
    brackets = _STRINGS.sub(b"", encoded).translate(None, _NOT_BRACKETS)
    for _ in range(levels):
        if not brackets:
            return False
        # Sibling pairs disappear together, so that what remains is the level above.
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    return bool(brackets)


@overload
def clean(text: str) -> str: ...
@overload
def clean(text: None) -> None: ...
def clean(text: str | None) -> str | None:
    """Replace characters that cannot be stored by U+FFFD."""
    if text is None or text.isascii():
        # The common case, without a copy.
        return text if text is None or "\0" not in text else text.replace("\0", "\ufffd")
    return text.replace("\0", "\ufffd").encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def decode_text(raw: bytes) -> str:
    """Decode bytes from the wire to text that can be stored."""
    return raw.decode("utf-8", "replace").replace("\0", "\ufffd")
