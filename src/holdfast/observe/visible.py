"""Text from others as data: characters that control a terminal, hide or reorder text are written out.

Everything that leaves for a terminal or a log passes through here; `observe.terminal` does so for rich. `visible` keeps
newlines and tabs, `flatten` does not. JSON keeps its value: there the characters are written as `\\u` escapes.

Written out are control characters (C0, DEL and C1), what changes the direction of text, line and paragraph separators,
characters without a width or a glyph, and lone surrogates. Not those that emoji and visible text need: variation
selectors, and format characters that are drawn.
"""

from __future__ import annotations

import json
import re
from typing import Final

_RANGES: Final = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, DEL, C1
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"  # soft hyphen, joiners, fillers, Arabic mark
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f"  # zero width, marks, separators, embeddings, isolates, deprecated
    "\u3164\ufeff\uffa0\ufff0-\ufffb"  # fillers, byte order mark, annotations
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U00013430-\U00013455"  # shorthand, music, hieroglyphs
    "\U000e0000-\U000e0fff"  # tag characters
    "\ud800-\udfff"  # surrogates
)
_HIDDEN: Final = re.compile(f"[{_RANGES}]")
_BREAKS: Final = re.compile(r"\r\n|[\n\t]")
_BLANKS: Final = re.compile(" +")


def visible(text: str) -> str:
    r"""Write out the characters that are not plain text, as Python does (`\x1b`, `\u202e`). Keeps newlines and tabs."""
    if text.isascii() and text.isprintable():
        # The common case, without a search.
        return text
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def fold(text: str) -> str:
    """Return text without newlines and tabs: they and the blanks of that text become one blank each."""
    return collapse(_BREAKS.sub(" ", text)) if "\n" in text or "\t" in text else text


def collapse(text: str) -> str:
    """Replace repeated blanks by one."""
    return _BLANKS.sub(" ", text).strip(" ")


def flatten(text: str) -> str:
    """Return visible text in one line."""
    return visible(fold(text))


def escape_newlines(text: str) -> str:
    r"""Return visible text with newlines written out (`\n`), so that a text cannot forge a second line."""
    return visible(text).replace("\n", "\\n")


def visible_json(document: str) -> str:
    r"""Write out the same characters in a JSON text, as `\u` escapes: the value stays the same."""
    if document.isascii() and "\x7f" not in document:
        # Control characters below a blank are escaped in every JSON text.
        return document
    return _HIDDEN.sub(lambda found: json.dumps(found[0])[1:-1], document)
