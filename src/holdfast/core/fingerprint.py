"""Fingerprints of requests: whether two submissions with one idempotency key are the same request (requirement E1).

A fingerprint has 16 characters of ASCII: 4 for the task, 1 for how its arguments were read, 11 for the arguments.

- `b` (bound): the task is known. Positional arguments have their names, and an argument that equals its default is
  left out, so that a new optional argument does not change the fingerprint of earlier requests.
- `r` (raw): the task is not known here. The payload is compared as it is.

In both, the order of keys and the spelling of numbers (`1`, `1.0`, `1e0`) do not matter. Fingerprints of which one is
bound and the other raw are compared by their task only, and a missing one equals every other: a request is never taken
for another one because of where it was submitted.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec

#: Length of a fingerprint; it is kept with every idempotency key.
FINGERPRINT_LENGTH: Final = 16
_TASK: Final = 4
_BOUND, _RAW = "b", "r"
#: Floats up to here are written as the integer that they equal; larger ones would have hundreds of digits.
_LARGEST: Final = 1e21


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < _LARGEST else value


_decoder: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder(float_hook=_number)
_encoder: Final = msgspec.json.Encoder(order="sorted")


def canonical(encoded: bytes) -> bytes:
    """JSON that is the same for equal values. Raises `msgspec.MsgspecError` and others."""
    return _encoder.encode(_decoder.decode(encoded))


def raw_fingerprint(task: str, payload: bytes) -> str:
    """The fingerprint of a request for a task that is not known here; empty if the payload cannot be read."""
    try:
        return _fingerprint(task, _RAW, canonical(payload))
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
        return ""


def bound_fingerprint(task: str, payload: bytes, names: Sequence[str], defaults: Mapping[str, bytes]) -> str:
    """The fingerprint of a request for a task with these parameters; empty if the payload cannot be read.

    `defaults` has the canonical JSON of each parameter with a default.
    """
    try:
        values = _decoder.decode(payload)
        if isinstance(values, list):
            values = dict(zip(names, values, strict=False))
        if not isinstance(values, dict):
            return ""
        given = {
            name: value
            for name, value in values.items()
            if name not in defaults or _encoder.encode(value) != defaults[name]
        }
        return _fingerprint(task, _BOUND, _encoder.encode(given))
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
        return ""


def is_key_reused(first: str, second: str) -> bool:
    """Whether two requests with these fingerprints are certainly not the same."""
    if first == second or len(first) != FINGERPRINT_LENGTH or len(second) != FINGERPRINT_LENGTH:
        return False
    return first[:_TASK] != second[:_TASK] or first[_TASK] == second[_TASK]


def _fingerprint(task: str, kind: str, arguments: bytes) -> str:
    return _hash(task.encode(errors="replace"), _TASK) + kind + _hash(arguments, FINGERPRINT_LENGTH - _TASK - 1)


def _hash(value: bytes, length: int) -> str:
    return urlsafe_b64encode(blake2b(value, digest_size=9).digest())[:length].decode()
