"""Fingerprints of requests: equal requests have equal ones, however they are written."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.codec import Arguments
from holdfast.core.fingerprint import FINGERPRINT_LENGTH, is_key_reused, raw_fingerprint

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


class Injected: ...


def call(first: int, second: Any = None, third: float = 1.0) -> None: ...


ARGUMENTS = Arguments(call, "call", Injected)


def reordered(value: Any) -> Any:
    """The same value with reversed keys, and integers as floats."""
    if isinstance(value, dict):
        return {key: reordered(item) for key, item in reversed(value.items())}
    if isinstance(value, list):
        return [reordered(item) for item in value]
    return float(value) if type(value) is int else value


@given(json_values)
def test_the_order_of_keys_and_the_spelling_of_numbers_do_not_matter(value: Any) -> None:
    one, two = (raw_fingerprint("t", msgspec.json.encode({"v": each})) for each in (value, reordered(value)))
    assert one == two
    assert len(one.encode()) == FINGERPRINT_LENGTH
    payloads = [msgspec.json.encode({"first": 1, "second": each}) for each in (value, reordered(value))]
    assert ARGUMENTS.fingerprint(payloads[0]) == ARGUMENTS.fingerprint(payloads[1])


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (b'{"first":1}', b'{"first":2}'),
        (b'{"first":1}', b'{"first":"1"}'),
        (b'{"first":1,"second":[1,2]}', b'{"first":1,"second":[2,1]}'),
        (b'{"first":1,"second":false}', b'{"first":1,"second":0}'),
        (b'{"first":1,"third":1.5}', b'{"first":1}'),
        (b'{"first":1,"second":{}}', b'{"first":1}'),
        (b'{"first":9007199254740993}', b'{"first":9007199254740992}'),
    ],
)
def test_other_arguments_have_another_fingerprint(one: bytes, two: bytes) -> None:
    for fingerprint in (ARGUMENTS.fingerprint, lambda payload: raw_fingerprint("call", payload)):
        assert is_key_reused(fingerprint(one), fingerprint(two))


def test_defaults_and_the_form_of_the_call_do_not_matter() -> None:
    forms = [b'{"first":1}', b"[1]", b"[1,null]", b"[1.0,null,1]", b'{"third":1e0,"second":null,"first":1}']
    assert len({ARGUMENTS.fingerprint(form) for form in forms}) == 1


def test_another_task_is_another_request_and_mixed_kinds_are_compared_by_task_only() -> None:
    payload, other = b'{"first":1}', b'{"first":2}'
    assert is_key_reused(raw_fingerprint("one", payload), raw_fingerprint("two", payload))
    assert is_key_reused(ARGUMENTS.fingerprint(payload), raw_fingerprint("other", payload))
    assert not is_key_reused(ARGUMENTS.fingerprint(payload), raw_fingerprint("call", other))
    assert not is_key_reused(raw_fingerprint("call", other), ARGUMENTS.fingerprint(payload))


@pytest.mark.parametrize("missing", ["", "short", "longer than sixteen characters"])
def test_what_cannot_be_compared_is_equal(missing: str) -> None:
    fingerprint = raw_fingerprint("t", b"{}")
    assert not is_key_reused(fingerprint, missing)
    assert not is_key_reused(missing, fingerprint)


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b'"text"', b"7", b'{"a":"\\ud800"}'],
    ids=["empty", "cut", "binary", "deep", "deep object", "text", "number", "surrogate"],
)
def test_hostile_payloads_do_not_raise(payload: bytes) -> None:
    for fingerprint in (ARGUMENTS.fingerprint(payload), raw_fingerprint("t", payload)):
        assert len(fingerprint) in (0, FINGERPRINT_LENGTH)


def test_large_numbers_stay_small() -> None:
    payload = b'{"v":[' + b",".join([b"1e308"] * 50_000) + b"]}"
    assert raw_fingerprint("t", payload)
    assert raw_fingerprint("t", b'{"v":1e400}')
