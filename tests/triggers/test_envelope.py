"""Raw messages become envelopes; invalid headers are handled and not misread."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from holdfast.brokers.port import RawMessage
from holdfast.errors import PayloadTooLarge
from holdfast.triggers.envelope import (
    HeaderNames,
    MessageEnvelope,
    ParseError,
    key_or_hash,
    parser_of,
    tenant_and_event_hint,
    trace_id_of,
)

_AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
_W3C = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def _raw(headers: Mapping[str, str] | None = None, body: bytes = b'{"n": 1}', message_id: str = "m-1") -> RawMessage:
    return RawMessage(message_id, body, headers or {}, _AT, {})


def _envelope(headers: Mapping[str, str] | None = None, kind: str = "json", **fields: Any) -> MessageEnvelope:
    return MessageEnvelope.from_raw(_raw(headers, **fields), "orders", parser_of(kind))


def test_all_fields() -> None:
    headers = {"x-dedup-key": "k", "x-event-name": "order.paid", "x-tenant-id": "acme", "other": "ä"}
    envelope = _envelope(headers)
    assert (envelope.message_id, envelope.payload, envelope.headers) == ("m-1", {"n": 1}, headers)
    assert (envelope.received_at, envelope.source) == (_AT, "orders")
    assert (envelope.dedup_key, envelope.event_name, envelope.tenant_id) == ("k", "order.paid", "acme")
    assert envelope.context() == {
        "message": {"n": 1},
        "headers": headers,
        "source": "orders",
        "message_id": "m-1",
        "received_at": "2026-01-02T03:04:05+00:00",
    }


def test_without_headers() -> None:
    envelope = _envelope()
    assert (envelope.dedup_key, envelope.event_name, envelope.tenant_id) == (None, None, None)
    assert (envelope.event, envelope.tenant, envelope.trace_id) == ("queue_message", "default", "queue-m-1")
    blank = _envelope({"x-event-name": "  ", "x-tenant-id": "", "x-dedup-key": ""})
    assert (blank.dedup_key, blank.event_name, blank.tenant_id) == (None, None, None)


def test_header_names_are_configurable() -> None:
    names = HeaderNames(event_name="type", dedup_key="id", tenant_id="account")
    raw = _raw({"type": "a", "id": "b", "account": "c", "x-event-name": "no"})
    envelope = MessageEnvelope.from_raw(raw, "orders", parser_of("json"), names)
    assert (envelope.event_name, envelope.dedup_key, envelope.tenant_id) == ("a", "b", "c")


@pytest.mark.parametrize("key", ["k" * 1_001, "ä" * 501, "nul\0", "half \ud800"])
def test_a_key_that_cannot_be_stored_is_replaced_by_its_hash(key: str) -> None:
    found = key_or_hash(key)
    assert found == "sha256-" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    assert key_or_hash("k" * 1_000) == "k" * 1_000


def test_an_over_long_dedup_key() -> None:
    first, second = _envelope({"x-dedup-key": "k" * 5_000}), _envelope({"x-dedup-key": "k" * 5_001})
    assert first.dedup_key is not None
    assert first.dedup_key.startswith("sha256-")
    assert first.dedup_key != second.dedup_key


@pytest.mark.parametrize("tenant", ["a b", "{a}", "t" * 201, "a\nb", "a\0"])
def test_an_invalid_tenant_is_refused(tenant: str) -> None:
    with pytest.raises(ParseError, match="in header x-tenant-id is not valid"):
        _envelope({"x-tenant-id": tenant})
    assert tenant_and_event_hint(_raw({"x-tenant-id": tenant, "x-event-name": "e"}), HeaderNames()) == ("default", "e")


@pytest.mark.parametrize("name", ["e" * 201, "a\x07b"])
def test_an_invalid_event_name_is_refused(name: str) -> None:
    with pytest.raises(ParseError, match="event name"):
        _envelope({"x-event-name": name})
    assert tenant_and_event_hint(_raw({"x-event-name": name, "x-tenant-id": "acme"}), HeaderNames()) == (
        "acme",
        "queue_message",
    )


def test_invalid_characters_in_headers_are_replaced() -> None:
    assert _envelope({"odd": "half \ud800 and nul \0é"}).headers == {"odd": "half \ufffd and nul \0é"}


def test_a_too_large_message_is_refused() -> None:
    with pytest.raises(PayloadTooLarge, match="the message has 8 bytes"):
        MessageEnvelope.from_raw(_raw(), "orders", parser_of("json"), payload_limit=7)


def test_traces() -> None:
    traced = _envelope({"traceparent": _W3C})
    assert (traced.trace_id, traced.traceparent) == ("4bf92f3577b34da6a3ce929d0e0e4736", _W3C)
    both = _envelope({"traceparent": _W3C, "x-trace-id": "mine"})
    assert (both.trace_id, both.traceparent) == ("mine", _W3C)
    for bad in ("", "x", _W3C.upper(), "ff" + _W3C[2:], "00-" + "0" * 32 + _W3C[35:]):
        odd = _envelope({"traceparent": bad, "x-trace-id": "x" * 2_000})
        assert (odd.trace_id, odd.traceparent) == ("queue-m-1", "")
    assert trace_id_of(_raw({"x-trace-id": "mine"})) == "mine"
    assert trace_id_of(_raw(message_id="m" * 3_000)).startswith("sha256-")


def test_headers_take_precedence_over_a_cloud_event() -> None:
    body = b'{"specversion": "1.0", "id": "e-1", "source": "/s", "type": "t", "data": 1, "tenantid": "acme"}'
    plain = _envelope(kind="cloudevents", body=body)
    assert (plain.event_name, plain.dedup_key, plain.payload) == ("t", "e-1", 1)
    with_headers = _envelope(
        {"x-event-name": "mine", "x-dedup-key": "k", "ce-source": "/header"}, "cloudevents", body=body
    )
    assert (with_headers.event_name, with_headers.dedup_key, with_headers.headers["ce-source"]) == (
        "mine",
        "k",
        "/header",
    )
    names = HeaderNames(tenant_id="ce-tenantid")
    assert MessageEnvelope.from_raw(_raw(body=body), "q", parser_of("cloudevents"), names).tenant_id == "acme"


def test_a_zero_byte_next_to_other_text_stays_in_a_header() -> None:
    envelope = MessageEnvelope.from_raw(
        _raw({"x-ascii": "a\0b", "x-other": "é\0ü", "x-lone": "é\ud800"}), "q", parser_of("json")
    )
    assert (envelope.headers["x-ascii"], envelope.headers["x-other"]) == ("a\0b", "é\0ü")
    assert envelope.headers["x-lone"] == "é\ufffd"
