"""Unpack the moves of a feed entry, and check their types. Raises any error for what no script has packed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import msgspec

from holdfast.core.job import Meta, decode_meta
from holdfast.core.text import MESSAGE_DEPTH, too_deep

_decode_object: Final = msgspec.json.Decoder(dict[str, Any]).decode
_decode_history: Final = msgspec.json.Decoder(list[Any]).decode
#: Values per job in entries that carry the arguments of a script unchanged.
WIDTHS: Final = {
    "created": 10,
    "created_plain": 4,
    "claimed": 3,
    "settled": 10,
    "settled_for_ledger": 10,
    "moved": 7,
    "operator": 8,
    "told": 8,
    "heartbeat": 5,
}

#: Kinds that may have positions to ignore.
_SKIPPING: Final = {kind: WIDTHS[kind] for kind in ("created", "created_plain", "settled", "settled_for_ledger")}
#: Text in the moves of each kind: values at these columns of a job's values.
_TEXT_AT: Final = {
    "created": (1, 2, 3, 4, 6, 7, 8, 9),
    "created_plain": (1, 2, 3),
    "claimed": (0, 1, 2),
    "settled": (4, 6),
    "settled_for_ledger": (4, 6),
    "moved": (0, 6),
    "operator": (0, 1, 6, 7),
    "told": (0, 1, 6, 7),
    "heartbeat": (0, 1, 4),
}
#: The same for kinds that have a list for each job.
_TEXT_IN: Final = {
    "retried": (0, 1, 4),
    "retaken": (0, 1, 4),
    "reclaimed": (0, 1, 3, 4, 6),
    "restored": (0, 6),
    "adopted": (0, 1, 2),
}
_TEXT: Final = frozenset({str})
#: What scripts write: text, counts, lists of these. Not floats, maps, nil, or numbers that a ledger cannot store.
_Scalar = str | Annotated[int, msgspec.Meta(ge=-(10**15), le=10**15)]
_decode_moves: Final = msgspec.msgpack.Decoder(list[_Scalar | list[_Scalar | list[_Scalar]]]).decode
_encode_moves: Final = msgspec.msgpack.Encoder().encode
_MAX_COUNT: Final = 10**9
_MAX_MS: Final = 10**15
#: Nesting of an event's data: it may contain JSON of a message, a level or two further inside.
_DATA_DEPTH: Final = MESSAGE_DEPTH + 20


def unpack_moves(kind: str, packed: bytes, skipped: bytes | None) -> list[Any]:
    """The moves of an entry, without those to ignore; the names of jobs, tenants and workers in them are text."""
    moves = _unpack(packed)
    if skipped:
        moves = _drop_skipped(moves, set(_unpack(skipped)), _SKIPPING[kind])
    _require_text(kind, moves)
    return moves


def _require_text(kind: str, moves: list[Any]) -> None:
    """Raise `TypeError` if names are not text. Other programs can write entries."""
    if (columns := _TEXT_AT.get(kind)) is not None:
        width = WIDTHS[kind]
        if not all(_TEXT.issuperset(map(type, moves[column::width])) for column in columns):
            raise TypeError("names are not text")
        return
    for move in moves:
        if type(move) is not list or not _TEXT.issuperset(type(move[column]) for column in _TEXT_IN[kind]):
            raise TypeError("names are not text")


def read_count(value: Any) -> int:
    """Convert a count. Raises `ValueError` for one that no script writes."""
    if value == "0":
        # By far the most frequent.
        return 0
    count = int(value)
    if not 0 <= count <= _MAX_COUNT:
        raise ValueError(f"{count} is not a count")
    return count


def read_instant(value: str | bytes) -> int:
    at_ms = int(value)
    if not 0 <= at_ms <= _MAX_MS:
        raise ValueError(f"{at_ms} is not an instant")
    return at_ms


def read_meta(text: str) -> Meta:
    """`Meta` of a creation. Raises `ValueError` for what a later step could not process."""
    if text and too_deep(text.encode(), _DATA_DEPTH):
        raise ValueError("its meta is nested too deeply")
    return decode_meta(text)


def read_history(text: str) -> list[Any]:
    if too_deep(text.encode(), _DATA_DEPTH):
        raise ValueError("its history is nested too deeply")
    return _decode_history(text)


def read_data(text: str) -> dict[str, Any]:
    """Data of an event. Raises `ValueError` for what a later step could not process."""
    if too_deep(text.encode(), _DATA_DEPTH):
        raise ValueError("its data is nested too deeply")
    return _decode_object(text)


def text_in(data: Mapping[str, Any], *names: str) -> str:
    """The first of these values that is a text and not empty."""
    for name in names:
        if (value := data.get(name)) and type(value) is str:
            return value
    return ""


def strides(values: list[Any], width: int) -> Iterator[tuple[Any, ...]]:
    return zip(*(iter(values),) * width, strict=True)


def _drop_skipped(moves: list[Any], skipped: set[int], width: int) -> list[Any]:
    """Return the moves without the skipped ones, whose positions count from 1."""
    return [
        value
        for position in range(len(moves) // width)
        if position + 1 not in skipped
        for value in moves[position * width : (position + 1) * width]
    ]


def _unpack(packed: bytes) -> list[Any]:
    """Decode what a script packed. Raises any error for what none has packed."""
    try:
        return _decode_moves(packed)
    except UnicodeDecodeError:
        # A forged message with holdfast's marker and bytes that are not text. It must not stop the feed.
        moves, _ = _unpack_leniently(packed, 0)
        return _decode_moves(_encode_moves(moves))


def _unpack_leniently(packed: bytes, at: int) -> tuple[Any, int]:
    """Decode the subset of msgpack that scripts write: arrays, text and counts."""
    code = packed[at]
    if code <= 0x7F:
        return code, at + 1
    if 0xA0 <= code <= 0xBF or 0xD9 <= code <= 0xDB:
        width = 0 if code <= 0xBF else 1 << (code - 0xD9)
        start = at + 1 + width
        size = int.from_bytes(packed[at + 1 : start]) if width else code & 0x1F
        return packed[start : start + size].decode("utf-8", "replace"), start + size
    if 0x90 <= code <= 0x9F or code in (0xDC, 0xDD):
        width = {0xDC: 2, 0xDD: 4}.get(code, 0)
        size = int.from_bytes(packed[at + 1 : at + 1 + width]) if width else code & 0x0F
        at, items = at + 1 + width, []
        for _ in range(size):
            item, at = _unpack_leniently(packed, at)
            items.append(item)
        return items, at
    if not 0xCC <= code <= 0xCF:
        raise ValueError(f"{code:#x} is not written by scripts")
    width = 1 << (code - 0xCC)
    return int.from_bytes(packed[at + 1 : at + 1 + width]), at + 1 + width
