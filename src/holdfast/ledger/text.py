"""Text that a ledger can hold: PostgreSQL takes neither NUL nor lone surrogates, and one bad text must not stop all."""

from __future__ import annotations

from typing import overload


@overload
def clean(text: str) -> str: ...
@overload
def clean(text: None) -> None: ...
def clean(text: str | None) -> str | None:
    """The text with what cannot be stored replaced by U+FFFD."""
    if text is None or text.isascii():
        # The usual case, without a copy.
        return text if text is None or "\0" not in text else text.replace("\0", "\ufffd")
    return text.replace("\0", "\ufffd").encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def decoded(raw: bytes) -> str:
    """Bytes from the wire as text that can be stored."""
    return raw.decode("utf-8", "replace").replace("\0", "\ufffd")
