"""Valid messages, made by the real encoders where there is one."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from holdfast.brokers import sqs_connection
from holdfast.brokers.port import OutgoingMessage
from holdfast.core.announcement import AnnouncedTask
from holdfast.core.job import (
    Approval,
    ApprovalRequest,
    Attempt,
    Claim,
    Failure,
    Lease,
    Meta,
    ReplayOrigin,
)
from holdfast.core.retry import Retry
from holdfast.engine.redis import wire
from holdfast.webhooks.signature import sign
from tests.fuzz.mutation import Fields

pack: Final = msgspec.msgpack.Encoder().encode
MARKER: Final = b"holdfast"
HEAD: Final = b"1 queued 0 0 1700000000000"
FAILURE: Final = Failure("BOOM", "it failed", "ValueError", "Traceback …")
META: Final = Meta(
    retry_count=2,
    lost_leases=1,
    unavailable_count=1,
    unavailable_since_ms=1_700_000_000_000,
    retry=Retry(max_retries=5, delays=[1, 2]),
    max_retries=4,
    context={"a": [1, {"b": None}], "text": "é"},
    history=(Attempt(1, "w1", 1_700_000_000_000, 1_700_000_000_500, "retrying", FAILURE),),
    dlq_id="d1",
    approval_request=ApprovalRequest("a1", "hash", "pay", "large", ("limit",), 2, 0, "ada", {"sum": 10}),
    approvals={"pay": Approval("a1", ("ada", "bob"), 1_700_000_000_000, "fine", "hash")},
    replay=ReplayOrigin("d1", "j0", "k0"),
    webhook="https://example.com/hook",
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    submitted_by="ci",
    key_window_ms=60_000,
    key_fingerprint="0123456789abcdef",
)
META_TEXT: Final = wire.encode_meta(META)
OLD_META: Final = b'{"ask": {"approval_id": "a", "payload_hash": "h"}, "cleared": "h", "consents": {}}'

SHORT: Final[Fields] = (MARKER, HEAD, b"task_id", b"j1", b"type", b"work", b"payload", b'{"number":1}')
LONG: Final[Fields] = (
    *SHORT,
    *(b"tenant_id", b"acme", b"idempotency_key", b"k1", b"trace_id", b"t1", b"meta", META_TEXT.encode()),
)
FOREIGN: Final[Fields] = (
    *(b"task_id", b"j1", b"type", b"work", b"payload", b'{"number":1}', b"tenant_id", b"acme"),
    *(b"idempotency_key", b"k1", b"trace_id", b"t1", b"max_retries", b"3", b"context", b'{"a":[1,{"b":null}]}'),
)
UNVERIFIED: Final[Fields] = (b"holdfast?", *LONG[1:])

CLAIM: Final = Claim(
    Lease("default", "j1", "1:1700000000000-0", 1, "w1"),
    "work",
    b'{"number":1}',
    "acme",
    "k1",
    "t1",
    2,
    1_700_000_000_000,
    1_700_000_000_100,
    META,
)
BODY: Final = wire.record_from_claim(
    CLAIM, META, 2, failure=wire.encode_failure(FAILURE), finished_at_ms=1, deliveries=1
)


def record(head: bytes, body: wire.JobBody | None = BODY) -> bytes:
    return head + b"\n" + (wire.encode_record(body) if body else b"")


RECORDS: Final[list[Fields]] = [
    (record(b"- %b token:1:w1#0123456789abcdef" % state), b"1700000000000", b"1")
    for state in (b"retrying", b"queued", b"suspended", b"waiting_approval", b"succeeded", b"failed", b"dlq_pending")
]

# Feed entries, as scripts write them ----------------------------------------------------------------


def entry(kind: str, moves: Any, skipped: bytes = b"") -> Fields:
    return (
        *(b"kind", kind.encode(), b"at", b"1700000000000", b"worker", b"w1", b"nonce", b"abcdef"),
        *(b"moves", pack(moves), b"skipped", skipped),
    )


_FAILURE_TEXT: Final = wire.encode_failure(FAILURE)
_DEAD: Final = ["dlq_id", "d1", "history", wire.encode_history(META)]
_DATA: Final = json.dumps({"actor": "ada", "reason": "because", "next_attempt_at_ms": 1_700_000_000_500})
_SETTLED: Final = (1, "1700000000000-0", 1, "t")
_HELD: Final = json.dumps({"message": "m"})
_RELEASED: Final = json.dumps({"started": False})
_AUDIT: Final = json.dumps({"before": {"a": 1}, "after": None, "actor": "ada"})
FEED: Final[list[Fields]] = [
    entry("created_plain", [1, "j1", "work", '{"number":1}', 1, "j2", "work", "[1]"]),
    entry("created_plain", [1, "j1", "work", '{"number":1}', 1, "j2", "work", "[1]"], pack([2])),
    entry("created", [1, "j1", "work", "{}", "hold in 500", 3, "acme", "k1", "t1", META_TEXT]),
    entry("created", [1, "j1", "work", "{}", "at 1700000000900", 0, "default", "j1", "", ""]),
    entry("claimed", ["j1", HEAD.decode(), "", "j2", "1 retrying 2 1 1700000000000", "acme"]),
    entry(
        "settled",
        [
            *(*_SETTLED, "j1", "succeeded", '{"ok":true}', 1, "0", 0),
            *(*_SETTLED, "j2", "retrying", _FAILURE_TEXT, 1, "1", [500, 0, 0, [], "acme"]),
            *(*_SETTLED, "j3", "dlq_pending", _FAILURE_TEXT, 1, "1", [0, 7, 9, _DEAD, ""]),
        ],
    ),
    entry(
        "settled_for_ledger",
        [
            *(*_SETTLED, "j3", "dlq_pending", _FAILURE_TEXT, 1, "1", [0, 7, 9, _DEAD, ""]),
            *(*_SETTLED, "j4", "waiting_approval", _HELD, 1, "1", [0, 0, 0, [], ""]),
            *(*_SETTLED, "j5", "queued", _RELEASED, 1, "1", [9, 0, 0, [], ""]),
        ],
    ),
    entry("retried", [["j1", HEAD.decode(), 2, "1", "acme"]]),
    entry("reclaimed", [["j1", HEAD.decode(), 2, "w0", "1700000000000-0", "", "acme"]]),
    entry(
        "adopted",
        [
            ["created", "j1", "default", "work", "{}", "k", "t", META_TEXT],
            ["claimed", "j1", "default", 1, "w1"],
            ["reclaimed", "j1", "default", 2, "w0", "1700000000000-0", "w1", "0"],
            ["duplicate", "j1", "default", "1700000000000-5", 1],
            ["dlq_pending", "j2", "default", json.dumps({"code": "X", "message": "m", "dlq_id": "d", "history": []})],
            ["dlq_recorded", "j2", "default"],
            ["failed", "j2", "default"],
        ],
    ),
    entry(
        "operator",
        [
            *("", "j1", "queued", "cancelled", "1", "0", _DATA, "acme"),
            *("operator.job", "j1", "", "", 0, 0, _AUDIT, "acme"),
            *("task.expedited", "j1", "", "", "1", "0", _DATA, ""),
        ],
    ),
    entry("moved", ["j1", "suspended", "queued", "1", "0", _DATA, "acme"]),
    entry("restored", [["j1", "running", "queued", 1, "0", 0, "acme"], ["j2", "retrying", "retrying", 1, "1", 5, ""]]),
    entry("heartbeat", ["j1", HEAD.decode(), 1, "", "acme"]),
]

CONTROL: Final[Fields] = (
    *(b"paused", b"1", b"max_running", b"5", b"concurrency", b"3", b"intake_limit", b"100", b"backlog_alert", b"50"),
    *(b"tenants", b'{"acme":{"weight":3,"concurrency":2,"intake_limit":10}}', b"lanes", b"1 2 16"),
)
ANNOUNCED: Final[list[Fields]] = [
    (
        msgspec.json.encode(
            AnnouncedTask(
                task="work",
                queue="default",
                fingerprint="0123456789abcdef",
                schema='{"type":"object","properties":{"number":{"type":"integer","minimum":0}},"required":["number"]}',
                seen_at_ms=1_700_000_000_000,
            )
        ),
        b'{"number":1}',
    )
]

# Brokers --------------------------------------------------------------------------------------------

HEADERS: Final = {
    "x-event-name": "order.paid",
    "x-dedup-key": "k1",
    "x-tenant-id": "acme",
    "traceparent": META.traceparent,
    "x-trace-id": "t1",
    "content-type": "application/json",
}
#: Body, key, then names and values of headers.
MESSAGE: Final[Fields] = (
    b'{"a":[1,2,{"b":null}]}',
    b"key",
    *(part.encode() for pair in HEADERS.items() for part in pair),
)
CLOUD_EVENT: Final = json.dumps(
    {"specversion": "1.0", "id": "e1", "source": "/s", "type": "paid", "time": "2026-01-01T00:00:00Z", "data": {"a": 1}}
).encode()
CLOUD_EVENT_64: Final = json.dumps(
    {"specversion": "1.0", "id": "e1", "source": "/s", "type": "paid", "data_base64": base64.b64encode(b"x").decode()}
).encode()
MESSAGES: Final[list[Fields]] = [MESSAGE, (CLOUD_EVENT, *MESSAGE[1:]), (CLOUD_EVENT_64,), (b"text", b""), (b"", b"k")]


def _received(message: OutgoingMessage) -> bytes:
    sent = sqs_connection.encode(message, fifo=True)
    return json.dumps(
        {
            "MessageId": "m1",
            "ReceiptHandle": "r1",
            "Body": sent["MessageBody"],
            "MessageAttributes": sent.get("MessageAttributes", {}),
            "Attributes": {
                "SentTimestamp": "1700000000000",
                "ApproximateReceiveCount": "2",
                "MessageGroupId": sent.get("MessageGroupId", ""),
            },
        }
    ).encode()


SQS: Final[list[Fields]] = [
    (_received(OutgoingMessage("q", b'{"a":1}', HEADERS, "key", "m1")),),
    (_received(OutgoingMessage("q", b"\xff", {f"h{n}": "v\0" for n in range(12)}, "k\0y", "m1")),),
    (_received(OutgoingMessage("q", b"", {}, "", "m1")),),
]

OUTBOX: Final[list[Fields]] = [
    (
        b'{"task":"work","payload":{"number":1},"idempotency_key":"k1","trace_id":"t1","delay_ms":5,"meta":'
        + META_TEXT.encode()
        + b"}",
        b'{"schema":"0123456789abcdef","x":1}',
        b"default",
        b"k1",
        b"1700000000000",
        b"acme",
        b"0190-job-id",
    ),
    (b'{"a":1}', b'{"content-type":"application/json","x-event-name":"paid"}', b"topic", b"", b"1", b"default", b"i"),
    (base64.b64encode(b"bytes"), b'{"holdfast-encoding":"base64"}', b"topic", b"k", b"1", b"default", b"i"),
]

_HOOK: Final = b'{"type":"job.failed","timestamp":"2026-01-01T00:00:00Z","data":{"job_id":"j1"}}'
HOOK_AT: Final = datetime.fromtimestamp(1_700_000_000, UTC)
HOOK_KEY: Final = b"0" * 32
HOOK_SECRET: Final = "whsec_" + base64.b64encode(HOOK_KEY).decode()
WEBHOOK: Final[list[Fields]] = [
    (_HOOK, *(part.encode() for pair in sign([HOOK_KEY], "w1", 1_700_000_000, _HOOK).items() for part in pair))
]

# SQLite ---------------------------------------------------------------------------------------------

WORK_ROW: Final = [
    7,
    "j1",
    "work",
    "acme",
    "k1",
    "t1",
    "queued",
    0,
    0,
    0,
    None,
    None,
    1_700_000_000_000,
    None,
    1,
    "{}",
    META_TEXT,
]
INFO_ROW: Final = [
    *(7, "j1", "work", "default", "acme", "retrying", 1, "{}", "k1", "t1", META_TEXT, 1_700_000_000_000, "w1"),
    *('{"ok":true}', "BOOM", "it failed", 1_700_000_000_500, 1_700_000_000_500, None, "0123456789abcdef"),
]
EVENT_ROWS: Final = [
    [
        1,
        "n",
        0,
        5,
        "task.created",
        "j1",
        "acme",
        1_700_000_000_000,
        None,
        "queued",
        0,
        0,
        None,
        None,
        '{"task":"work"}',
    ],
    [2, "n", 1, 6, "task.claimed", "j1", "acme", 1_700_000_000_000, "queued", "running", 1, 0, "w1", "m", None],
    [3, "n", 0, None, *[None] * 11],
]
