"""Hypothesis strategies for messages."""

from __future__ import annotations

import json
from typing import Any, Final

from hypothesis import strategies as st

_RESERVED: Final = {"x-event-name", "x-dedup-key", "x-tenant-id", "x-trace-id", "traceparent"}

#: Printable, without blanks and braces.
_PLAIN: Final = st.characters(codec="utf-8", categories=["L", "N", "P", "S"], exclude_characters="{}")
_ANY: Final = st.characters(codec="utf-8", exclude_characters="\0")

EVENTS: Final = st.text(_PLAIN, min_size=1, max_size=40)
TENANTS: Final = st.text(_PLAIN, min_size=1, max_size=40)
FOCUSES: Final = st.none() | st.text(max_size=30)
DEDUP_KEYS: Final = st.text(_ANY, min_size=1, max_size=60)
TEXTS: Final = st.text(max_size=60)
HEADER_NAMES: Final = st.text("abcxyz019-", min_size=1, max_size=12).filter(lambda name: name not in _RESERVED)
#: Headers without a meaning for a trigger.
HEADERS: Final = st.dictionaries(HEADER_NAMES, st.text(_ANY, max_size=20), max_size=4)

JSON: Final[st.SearchStrategy[Any]] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def json_bodies(draw: st.DrawFn, values: st.SearchStrategy[Any] = JSON) -> tuple[Any, bytes]:
    """Draw a value and one of its encodings."""
    value = draw(values)
    text = json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 2])))
    return value, (draw(st.sampled_from(["", " ", "\n\t"])) + text).encode()


def is_same(one: Any, other: Any) -> bool:
    """Return whether both are equal and of the same types at every level: 1 is not 1.0 or True, 0.0 is not -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return repr(one) == repr(other)
