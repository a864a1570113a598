"""Parsers of brokers, triggers, outbox, webhooks and HTTP; the codec of payloads."""

from __future__ import annotations

import inspect
import json
import struct
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiormq.abc import DeliveredMessage
from confluent_kafka import TIMESTAMP_CREATE_TIME
from pamqp import commands

from holdfast.brokers import rabbitmq_messages, redis_connection, sqs_connection
from holdfast.brokers.kafka import poller
from holdfast.brokers.port import RawMessage, dead_letter_headers
from holdfast.brokers.rabbitmq_connection import RabbitConfig
from holdfast.core import codec
from holdfast.core.announcement import AnnouncedTask, choose
from holdfast.core.fingerprint import raw_fingerprint
from holdfast.core.webhook_url import parse_secrets
from holdfast.errors import HoldfastError, InvalidPayload, SignatureInvalid, UsageError
from holdfast.http import operation, subscribers
from holdfast.http.problems import BadRequest, Unprocessable
from holdfast.ledger.port.messages import OutboxStatus
from holdfast.ledger.queries.job_list import from_cursor as job_cursor
from holdfast.ledger.queries.paging import from_cursor
from holdfast.ledger.transactions.outbox import event_from_row
from holdfast.outbox.destinations import plain, to_cloud_event
from holdfast.outbox.writer import envelope_from_event
from holdfast.triggers.envelope import (
    HeaderNames,
    MessageEnvelope,
    ParseError,
    parser_of,
    tenant_and_event_hint,
    trace_id_of,
)
from holdfast.triggers.http_runtime import _headers as http_headers
from holdfast.triggers.runtime import RuntimeCall
from holdfast.webhooks.signature import verify
from tests.fuzz import corpus
from tests.fuzz.mutation import Fields
from tests.fuzz.targets import Target, even, field, text


def _pairs(fields: Fields) -> list[tuple[bytes, bytes]]:
    flat = even(fields)
    return list(zip(flat[::2], flat[1::2], strict=True))


# Brokers --------------------------------------------------------------------------------------------


def handle(raw: RawMessage) -> object:
    """What a trigger does with a message of any broker."""
    trace_id_of(raw).encode()
    tenant, event = tenant_and_event_hint(raw, HeaderNames())
    (tenant + event).encode()
    done: list[object] = []
    for kind in ("json", "text", "binary", "cloudevents"):
        try:
            envelope = MessageEnvelope.from_raw(raw, "orders", parser_of(kind))
        except ParseError as exc:
            # Written to logs and to the dead letter.
            str(exc).encode()
            continue
        call = RuntimeCall(
            event_name=envelope.event,
            context=envelope.context(),
            focus=None,
            tenant_id=envelope.tenant,
            trace_id=envelope.trace_id,
            traceparent=envelope.traceparent,
            key=envelope.dedup_key or "",
            window_ms=1,
            trigger="t",
            message_json=envelope.json,
        )
        done.append(http_headers(call))
        # A task gets the context as arguments; what is not JSON is refused.
        try:
            done.append(codec.encode_json(envelope.context(), "the message"))
        except InvalidPayload:
            done.append(None)
    history = ["attempt 1 failed"]
    done.append(dead_letter_headers(raw, "orders", "reason", history, limit=100))
    return done


def redis_stream(fields: Fields) -> object:
    raw = redis_connection.to_message(b"1700000000000-0", _pairs(fields), {}, 1)
    redis_connection.to_fields(raw.body or b"", raw.headers, raw.key)
    redis_connection.entry_position(raw)
    return handle(raw)


@dataclass
class _KafkaMessage:
    """As `confluent_kafka.Message`: names of headers are text, values bytes."""

    fields: Fields

    def topic(self) -> str:
        return "orders"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 7

    def timestamp(self) -> tuple[int, int]:
        number = field(self.fields, 2)[:8].rjust(8, b"\0")
        return TIMESTAMP_CREATE_TIME, struct.unpack(">q", number)[0]

    def key(self) -> bytes | None:
        return field(self.fields, 1) or None

    def value(self) -> bytes | None:
        return self.fields[0] if self.fields else None

    def headers(self) -> list[tuple[str, bytes | None]]:
        return [(text(name), value or None) for name, value in _pairs(self.fields[2:])]


def kafka(fields: Fields) -> object:
    message: Any = _KafkaMessage(fields)
    return handle(poller._raw(message, 0))


def sqs(fields: Fields) -> object:
    received = json.loads(field(fields, 0))
    raw = sqs_connection.decode(_typed(received), "orders")
    dead = sqs_connection.dead_letter(raw, "dlq", "orders", "reason", ["failed"])
    sqs_connection.size_of(sqs_connection.encode(dead, fifo=True))
    return handle(raw)


def _typed(received: Any) -> dict[str, Any]:
    """The response as botocore types it: maps, lists and text; text is XML 1.0, and ids are AWS's."""
    given = received if isinstance(received, dict) else {}
    attributes = given.get("MessageAttributes")
    system = given.get("Attributes")
    return {
        "MessageId": "m1",
        "ReceiptHandle": "r1",
        "Body": str(given.get("Body", "")),
        "MessageAttributes": {
            str(name): {"StringValue": str(value.get("StringValue", ""))} if isinstance(value, dict) else {}
            for name, value in (attributes.items() if isinstance(attributes, dict) else ())
        },
        "Attributes": {str(name): str(value) for name, value in (system.items() if isinstance(system, dict) else ())},
    }


_PROPERTIES: Final = commands.Basic.Properties(
    content_type="application/json",
    headers={
        "x-event-name": "paid",
        "n": 1,
        "f": 0.5,
        "l": [1, {"a": None}],
        "t": {"a": [True]},
        "b": bytearray(b"\xff"),
    },
    message_id="m1",
    correlation_id="c1",
    timestamp=corpus.HOOK_AT,
    app_id="app",
)


def _amqp_header(properties: commands.Basic.Properties) -> bytes:
    return struct.pack(">HHQ", 60, 0, 5) + properties.marshal()


def rabbitmq(fields: Fields) -> object:
    """The body of a content header frame, then the body of the message."""
    parsed = rabbitmq_messages.read_header(field(fields, 0))
    delivery = commands.Basic.Deliver("tag", 1, False, "", "orders")
    delivered = DeliveredMessage(delivery=delivery, header=parsed, body=field(fields, 1), channel=None)  # type: ignore[arg-type]
    settings = RabbitConfig()
    raw = rabbitmq_messages.raw_message(delivered, settings)
    rabbitmq_messages.dead_letter(raw, "dlq", "orders", "reason", ["failed"])
    return handle(raw)


# Outbox, webhooks -----------------------------------------------------------------------------------


def outbox(fields: Fields) -> object:
    """A row, whose columns have their types but any contents."""
    number = field(fields, 4)
    row = {
        "payload": text(field(fields, 0)),
        "headers": text(field(fields, 1)),
        "topic": text(field(fields, 2)),
        "key": text(field(fields, 3)),
        "created_at": int(number) if number.isdigit() and len(number) < 19 else 0,
        "tenant_id": text(field(fields, 5)),
        "id": text(field(fields, 6)),
        "destination": "holdfast",
        "status": OutboxStatus.NEW.value,
        "attempt_count": 0,
        "next_retry_at": None,
        "last_error": None,
        "sent_at": None,
        "position": 1,
    }
    event = event_from_row(row)
    found: list[object] = []
    for encode in (plain, lambda event: to_cloud_event(event, "/s")):
        try:
            found.append(encode(event))
        except (ValueError, ArithmeticError, OSError, RecursionError):
            # `BrokerDestination` answers with a permanent failure of this event.
            found.append(None)
    try:
        found.append(msgspec.json.encode(envelope_from_event(event)))
    except InvalidPayload:
        found.append(None)
    return found


def webhook(fields: Fields) -> object:
    headers = {text(name): text(value) for name, value in _pairs(fields[1:])}
    return verify(headers, field(fields, 0), corpus.HOOK_SECRET, now=corpus.HOOK_AT)


def secrets(fields: Fields) -> object:
    return [parse_secrets(text(value)) for value in fields]


# HTTP -----------------------------------------------------------------------------------------------


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    task: str
    payload: msgspec.Raw = msgspec.Raw(b"{}")
    context: dict[str, Any] | None = None
    delay: float | None = None
    tags: list[str] = []


class _Query(msgspec.Struct, forbid_unknown_fields=True):
    limit: int | None = None
    state: list[str] = []
    full: bool | None = None
    cursor: str | None = None


_BODY: Final = msgspec.json.Decoder(_Body)
_QUERY: Final = operation.QueryReader(_Query)


def body(fields: Fields) -> object:
    found = operation.decode_body(field(fields, 0), _BODY)
    return operation.raw_arguments(found.payload), _QUERY.read(field(fields, 1))


def query(fields: Fields) -> object:
    return _QUERY.read(field(fields, 0))


def http_header(fields: Fields) -> object:
    scope = {"headers": [(name.lower(), value) for name, value in _pairs(fields)]}
    return operation.header(scope, b"authorization")


def event_id(fields: Fields) -> object:
    return [subscribers.LastEvent.parse(text(value)) for value in fields]


def cursor(fields: Fields) -> object:
    found: list[object] = []
    for value in fields:
        for parse in (from_cursor, job_cursor):
            try:
                found.append(parse(text(value)))
            except UsageError:
                found.append(None)
    return found


# Payloads -------------------------------------------------------------------------------------------


@dataclass
class _Order:
    number: int
    lines: list[float]


def _task(number: int, order: _Order, note: str | None = None, more: dict[str, Any] | None = None) -> dict[str, int]:
    raise NotImplementedError


_ARGUMENTS: Final = codec.Arguments(_task, "work", inspect.Signature)
_RESULTS: Final = codec.Results(_task, "work")


def arguments(fields: Fields) -> object:
    payload = field(fields, 0)
    raw_fingerprint("work", payload)
    _ARGUMENTS.fingerprint(payload)
    found = _ARGUMENTS.decode(payload)
    return codec.encode_json(found, "the arguments")


def result(fields: Fields) -> object:
    codec.result_decoder(_task)
    return codec.encode_json(_RESULTS.decode(field(fields, 0)), "the result")


def plain_json(fields: Fields) -> object:
    value = codec.decode_json(field(fields, 0), "the value")
    codec.canonical_json(value)
    return codec.to_plain_json(value, "the value")


def chosen(fields: Fields) -> object:
    found = msgspec.json.decode(field(fields, 0), type=AnnouncedTask)
    return choose("work", field(fields, 1), [found])


_ORDER: Final = b'{"number":1,"order":{"number":2,"lines":[1.5]},"note":"x","more":{"a":[1]}}'

OUTSIDE: Final = [
    Target(
        "Redis Streams message",
        redis_stream,
        [(b"body", each[0], b"key", field(each, 1), *each[2:]) for each in corpus.MESSAGES],
        (),
        (
            "triggers.envelope.parser_of",
            "triggers.envelope.parse_json",
            "triggers.envelope.parse_text",
            "triggers.envelope.parse_binary",
            "triggers.envelope.parse_cloud_event",
        ),
    ),
    Target("Kafka message", kafka, corpus.MESSAGES, (), ("brokers.kafka.poller._decode",)),
    Target(
        "SQS message",
        sqs,
        corpus.SQS,
        (ValueError, RecursionError),
        (
            "brokers.sqs_connection.decode",
            "brokers.sqs_connection._decode_body",
            "brokers.sqs_connection._unpack_headers",
            "brokers.sqs_connection._unpack_key",
        ),
    ),
    Target(
        "RabbitMQ message",
        rabbitmq,
        [(_amqp_header(_PROPERTIES), b'{"a":1}'), (_amqp_header(commands.Basic.Properties()), b"")],
        (),
        ("brokers.rabbitmq_messages.read_header",),
    ),
    Target("outbox row", outbox, corpus.OUTBOX),
    Target("webhook", webhook, corpus.WEBHOOK, (SignatureInvalid,)),
    Target(
        "webhook secret",
        secrets,
        [(corpus.HOOK_SECRET.encode(),)],
        (UsageError,),
        ("core.webhook_url.parse_secrets",),
    ),
    Target(
        "HTTP body",
        body,
        [(b'{"task":"work","payload":{"a":1},"context":{"b":2},"delay":1.5,"tags":["x"]}', b"limit=5")],
        (BadRequest, Unprocessable),
        ("http.operation.decode_body",),
    ),
    Target("HTTP query", query, [(b"limit=5&state=queued&state=running&full=true&cursor=abc",)], (Unprocessable,)),
    Target("HTTP header", http_header, [(b"authorization", b"Bearer abc")]),
    Target(
        "event id",
        event_id,
        [(b"1700000000000-AbCdEfGhIjKl", b"1700000000000-0", b"default=1700000000000-0.3;other=5-1")],
        (),
        (
            "http.subscribers.parse_position",
            "http.subscribers.LastEvent.parse",
        ),
    ),
    Target(
        "cursor",
        cursor,
        [(b"1700000000000000-6a31-64-61636d65",), (b"1700000000000000-6a31-61636d65",)],
        (),
        ("ledger.queries.paging.decode_cursor",),
    ),
    Target(
        "arguments",
        arguments,
        [(_ORDER,), (b"[1, {}]",)],
        (InvalidPayload,),
        ("core.codec.Arguments.decode", "core.codec._decode_other"),
    ),
    Target("result", result, [(b'{"a":1}',)], (HoldfastError,), ("core.codec.Results.decode",)),
    Target("plain JSON", plain_json, [(_ORDER,)], (HoldfastError,), ("core.codec.decode_json",)),
    Target("announced schema", chosen, corpus.ANNOUNCED, (InvalidPayload, ValueError, RecursionError)),
]
