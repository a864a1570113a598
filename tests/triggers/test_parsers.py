"""Bodies become payloads without loss, or a `ParseError` that does not show them."""

from __future__ import annotations

import base64
import json

import pytest

from holdfast.errors import InvalidOption
from holdfast.triggers.envelope import ParseError, parser_of


def test_json_is_parsed_without_loss() -> None:
    parsed = parser_of("json")(b'{"n": 123456789012345678901234567890, "k": 1, "k": 2, "t": "\xc3\xa4"}')
    assert parsed.payload == {"n": 123456789012345678901234567890, "k": 2, "t": "ä"}
    assert parsed.json is not None
    assert b"123456789012345678901234567890" in parsed.json


@pytest.mark.parametrize("value", [None, 0, "", [], {}, [1, "x", None], True, 1.5])
def test_json_of_any_kind(value: object) -> None:
    assert parser_of("json")(json.dumps(value).encode()).payload == value


@pytest.mark.parametrize(
    "body", [b"", b"{", b"NaN", b"\xff", b'"\xff"', b'"\\ud800"', b"\xef\xbb\xbf{}", b"[" * 100_000]
)
def test_invalid_json_is_refused_without_showing_it(body: bytes) -> None:
    with pytest.raises(ParseError, match="not valid JSON"):
        parser_of("json")(body)


def test_text_and_binary_are_unchanged() -> None:
    assert parser_of("text")("Grüße\0\n".encode()).payload == "Grüße\0\n"
    assert parser_of("text")(b"").payload == ""
    assert parser_of("binary")(bytes(range(256))).payload == bytes(range(256))
    with pytest.raises(ParseError, match=r"not UTF-8: byte 6 of 7") as caught:
        parser_of("text")(b"secret\xff")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", ["json", "text", "binary"])
def test_a_tombstone_is_not_an_empty_message(kind: str) -> None:
    parsed = parser_of(kind)(None)
    assert (parsed.payload, parsed.json) == (None, b"null")
    if kind != "json":
        assert parser_of(kind)(b"").payload in ("", b"")


def test_a_tombstone_is_not_a_cloud_event() -> None:
    with pytest.raises(ParseError, match="is a tombstone"):
        parser_of("cloudevents")(None)


def test_an_unknown_parser_is_refused() -> None:
    with pytest.raises(InvalidOption, match="json, text, binary, cloudevents"):
        parser_of("xml")


def _event(**changes: object) -> bytes:
    event = {"specversion": "1.0", "id": "e-1", "source": "/shop", "type": "order.paid", "data": {"n": 1}, **changes}
    return json.dumps({name: value for name, value in event.items() if value is not None}).encode()


def test_a_cloud_event() -> None:
    parsed = parser_of("cloudevents")(_event(subject="o-7", attempts=3))
    assert (parsed.payload, parsed.event_name, parsed.dedup_key) == ({"n": 1}, "order.paid", "e-1")
    assert json.loads(parsed.json or b"") == {"n": 1}
    assert parsed.headers["ce-source"] == "/shop"
    assert parsed.headers["ce-subject"] == "o-7"
    assert parsed.headers["ce-attempts"] == "3"


def test_a_cloud_event_with_bytes_and_without_data() -> None:
    parse = parser_of("cloudevents")
    encoded = base64.b64encode(b"\x00\xff").decode()
    assert parse(_event(data=None, data_base64=encoded)).payload == b"\x00\xff"
    assert parse(_event(data=None)).payload is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[]", "not valid JSON"),
        (_event(id=None), "'id' is missing"),
        (_event(type=""), "'type' is missing"),
        (_event(specversion="0.3"), "unsupported version"),
        (_event(data_base64="AA=="), "both data and data_base64"),
        (_event(data=None, data_base64="?"), "not base64"),
        (_event(data=None, data_base64=7), "not base64"),
    ],
)
def test_invalid_cloud_events_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        parser_of("cloudevents")(body)
