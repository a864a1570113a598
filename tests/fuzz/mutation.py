"""Mutations of messages: lists of fields, which are bytes.

The same seed gives the same mutations. JSON and msgpack are also changed by value, so that mutants pass the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any, Final

import msgspec

Fields = tuple[bytes, ...]

NUMBERS: Final = [
    0,
    -1,
    1,
    2**31,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    10**30,
    -(10**400),
    0.5,
    -0.0,
    1e308,
    -1e308,
    5e-324,
]
TEXTS: Final = [
    "",
    "\0",
    "\ud800",
    "\udfff\ud800",
    "é",
    "\u202e",
    "x" * 3_000,
    "NaN",
    "Infinity",
    "1e999",
    "true",
    "9" * 5_000,
    " ",
    "\n",
]
BYTES: Final = [
    b"",
    b"\0",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xf5\x80\x80\x80",
    b"\xc3",
    b"nan",
    b"inf",
    b"-inf",
    b"1e999",
    b"-1",
    b"9" * 400,
    b"9" * 5_000,
    b"0x10",
    b"{}",
    b"[]",
    b"null",
    b"NaN",
    b'"',
    b"\\u0000",
    b"\\ud800",
    b"[" * 300,
    b"[" * 2_000 + b"]" * 2_000,
    b'{"a":' * 1_500 + b"1" + b"}" * 1_500,
    b"\x91" * 3_000,
    b"\xdd\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc1",
    b"\xcb\x7f\xf8\0\0\0\0\0\0",
    b"\xcf" + b"\xff" * 8,
    b"\xc7\x04\x05abcd",
    b" ",
    b"\n",
]


def mutate(fields: Fields, others: Fields, random: Random) -> Fields:
    """Change a message in one to four ways. `others` are fields of other messages, for splices."""
    changed = list(fields)
    for _turn in range(random.choice((1, 1, 1, 2, 3, 4))):
        if changed and random.random() < 0.9:
            place = random.randrange(len(changed))
            changed[place] = random.choice(_FIELD)(changed[place], others, random)[:100_000]
        else:
            _change_list(changed, others, random)
    return tuple(changed)


def _change_list(fields: list[bytes], others: Fields, random: Random) -> None:
    """Drop, repeat, swap or insert a field."""
    kind = random.randrange(4)
    place = random.randrange(len(fields) + 1)
    if kind == 0:
        del fields[place : place + random.randint(1, 3)]
    elif kind == 1 and fields:
        fields.insert(place, random.choice(fields))
    elif kind == 2 and len(fields) > 1:
        other = random.randrange(len(fields))
        place = random.randrange(len(fields))
        fields[place], fields[other] = fields[other], fields[place]
    else:
        fields.insert(place, random.choice(others or (b"",)))


def _flip(data: bytes, _: Fields, random: Random) -> bytes:
    changed = bytearray(data)
    for _flip in range(random.randint(1, 4) if data else 0):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _overwrite(data: bytes, _: Fields, random: Random) -> bytes:
    changed = bytearray(data)
    if changed:
        changed[random.randrange(len(changed))] = random.randrange(256)
    return bytes(changed)


def _insert(data: bytes, _: Fields, random: Random) -> bytes:
    at = random.randint(0, len(data))
    return data[:at] + random.choice(BYTES) + data[at:]


def _truncate(data: bytes, _: Fields, random: Random) -> bytes:
    return data[: random.randint(0, len(data))]


def _delete(data: bytes, _: Fields, random: Random) -> bytes:
    start = random.randint(0, len(data))
    return data[:start] + data[start + random.randint(1, 8) :]


def _repeat(data: bytes, _: Fields, random: Random) -> bytes:
    start = random.randint(0, len(data))
    part = data[start : start + random.randint(1, 16)]
    return data[:start] + part * random.choice((2, 3, 50, 1_500)) + data[start:]


def _splice(data: bytes, others: Fields, random: Random) -> bytes:
    other = random.choice(others or (b"",))
    return data[: random.randint(0, len(data))] + other[random.randint(0, len(other)) :]


def _replace(_: bytes, others: Fields, random: Random) -> bytes:
    return random.choice(BYTES if random.random() < 0.7 else others or (b"",))


def _number(data: bytes, _: Fields, random: Random) -> bytes:
    """Replace a run of digits."""
    starts = [place for place, byte in enumerate(data) if 48 <= byte <= 57]
    if not starts:
        return data
    start = end = random.choice(starts)
    while end < len(data) and 48 <= data[end] <= 57:
        end += 1
    return data[:start] + str(random.choice((random.choice(NUMBERS), 10**18, -7))).encode() + data[end:]


def _by_value(data: bytes, _: Fields, random: Random) -> bytes:
    """Change a value inside JSON or msgpack, or one nested in the other."""
    value, encode = _decode(data)
    if encode is None:
        return data
    try:
        return encode(_change(value, random, 0))
    except (ValueError, TypeError, OverflowError, RecursionError, UnicodeError):
        return data


def _decode(data: bytes) -> tuple[Any, Callable[[Any], bytes] | None]:
    try:
        if data[:1] in (b"{", b"[", b'"'):
            return msgspec.json.decode(data), lambda value: json.dumps(value).encode()
        if data and data[0] >= 0x80:
            return msgspec.msgpack.decode(data), msgspec.msgpack.encode
    except (ValueError, RecursionError):
        pass
    return None, None


def _change(value: Any, random: Random, depth: int) -> Any:
    if depth < 20 and isinstance(value, list) and value and random.random() < 0.85:
        changed, place = list(value), random.randrange(len(value))
        kind = random.randrange(8)
        if kind == 0:
            del changed[place]
        elif kind == 1:
            changed.insert(place, random.choice(value))
        else:
            changed[place] = _change(value[place], random, depth + 1)
        return changed
    if depth < 20 and isinstance(value, dict) and value and random.random() < 0.85:
        changed_map, name = dict(value), random.choice(list(value))
        if random.randrange(8) == 0:
            changed_map[random.choice(TEXTS)] = changed_map.pop(name)
        else:
            changed_map[name] = _change(value[name], random, depth + 1)
        return changed_map
    if isinstance(value, str) and random.random() < 0.4:
        # JSON in a text.
        return _by_value(value.encode("utf-8", "replace"), (), random).decode("utf-8", "replace")
    return _value(random)


def _value(random: Random) -> Any:
    kind = random.randrange(6)
    if kind == 0:
        return random.choice(NUMBERS)
    if kind == 1:
        return random.choice(TEXTS)
    if kind == 2:
        nested: Any = random.choice(NUMBERS)
        for _ in range(random.choice((1, 3, 150, 250, 500))):
            nested = [nested] if random.random() < 0.5 else {"a": nested}
        return nested
    return random.choice((None, True, False, [], {}, "", 0, [None], {"": None}, b"bytes"))


_FIELD: Final[list[Callable[[bytes, Fields, Random], bytes]]] = [
    _flip,
    _overwrite,
    _insert,
    _truncate,
    _delete,
    _repeat,
    _splice,
    _replace,
    _number,
    _by_value,
    _by_value,
    _by_value,
]
