"""SQS settings, client, error translation and message encoding.

No log record contains a credential: botocore's loggers are filtered, because they write request headers at DEBUG.

SQS carries non-empty text of XML characters and ten attributes with restricted names. What fits is written unchanged,
so that other programs can read it. Otherwise a body becomes base64 (`x-body-encoding`) and headers become one JSON
attribute (`x-headers`); `decode` reverses both.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final
from uuid import uuid4

from aiobotocore.config import AioConfig  # type: ignore[import-untyped]
from aiobotocore.session import get_session  # type: ignore[import-untyped]
from botocore.exceptions import (  # type: ignore[import-untyped]
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
)
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from holdfast.brokers.port import OutgoingMessage, RawMessage, dead_letter_headers, timestamp_from_ms, tombstone_refused
from holdfast.errors import BrokerRefused, BrokerUnavailable
from holdfast.observe.redact import MASK, redact

#: Errors of calls that are caused by SQS or the network.
CONNECTION_ERRORS: Final = (BotoCoreError, ClientError, OSError, TimeoutError)

#: Maximum number of messages per request.
BATCH: Final = 10

_FIFO: Final = ".fifo"
#: Error codes that are temporary although their status is that of a refusal.
_LATER: Final = ("Throttl", "TooManyRequests", "RequestLimitExceeded", "OverLimit", "SlowDown")


class SqsConfig(BaseModel):
    """Address, credentials, timeouts and limits of SQS. Default credentials: AWS environment, profile or role."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    region: str = "us-east-1"
    #: An SQS-compatible server. Default: AWS.
    endpoint_url: str | None = None
    access_key: SecretStr | None = None
    secret_key: SecretStr | None = None
    session_token: SecretStr | None = None
    #: CA certificates that verify the server. Default: those of botocore.
    ca_file: str | None = None
    verify: bool = True

    #: Create a queue that does not exist. An existing queue stays unchanged.
    declare: bool = False
    #: The same for the dead-letter queue, when the first dead letter is written.
    declare_dlq: bool = True
    #: How long a received message is invisible to others; extended repeatedly while it is in flight.
    visibility_timeout_s: int = Field(default=30, ge=1, le=43_200)
    #: Duration of a long poll. 0: short polling, which costs more requests.
    wait_time_s: int = Field(default=20, ge=0, le=20)
    #: Concurrent receive requests on a busy queue.
    receives: int = Field(default=4, ge=1, le=50)
    #: The limit of SQS for a message with its attributes, and for a batch.
    max_message_bytes: int = Field(default=262_144, ge=1024)
    #: Timeout of all other requests.
    timeout_s: float = Field(default=10.0, gt=0)

    @field_validator("endpoint_url")
    @classmethod
    def _has_no_credentials(cls, url: str | None) -> str | None:
        if url is not None and "@" in url:
            raise ValueError("endpoint_url must not contain credentials; use access_key and secret_key")
        return url

    @property
    def address(self) -> str:
        """Endpoint or region, without credentials: safe to log."""
        return redact(self.endpoint_url or f"region {self.region}")

    def secrets(self) -> list[str]:
        """Values to mask in any text."""
        given = (self.access_key, self.secret_key, self.session_token)
        return [secret.get_secret_value() for secret in given if secret is not None and secret.get_secret_value()]


class _MaskingFilter(logging.Filter):
    """Masks secrets in the log of botocore, which writes request headers (with session tokens) at DEBUG."""

    def __init__(self) -> None:
        super().__init__()
        self.secrets: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if any(secret in text for secret in self.secrets):
            for secret in self.secrets:
                text = text.replace(secret, MASK)
            record.msg, record.args = text, ()
        return True


_masking_filter: Final = _MaskingFilter()
_NOISY_LOGGERS: Final = (
    "auth",
    "awsrequest",
    "client",
    "credentials",
    "endpoint",
    "hooks",
    "httpsession",
    "parsers",
    "retryhandler",
)


class SqsClient:
    """An aiobotocore client and a cache of queue URLs."""

    def __init__(self, settings: SqsConfig) -> None:
        self.settings = settings
        self._stack = AsyncExitStack()
        self._client: Any = None
        self._urls: dict[str, str] = {}

    @property
    def is_open(self) -> bool:
        return self._client is not None

    async def open(self) -> None:
        settings = self.settings
        _masking_filter.secrets.update(settings.secrets())
        for library in ("botocore", "aiobotocore"):
            for name in _NOISY_LOGGERS:
                logging.getLogger(f"{library}.{name}").addFilter(_masking_filter)
        config = AioConfig(
            connect_timeout=settings.timeout_s,
            read_timeout=settings.wait_time_s + settings.timeout_s,
            max_pool_connections=settings.receives + 16,
            # Callers retry and log themselves.
            retries={"total_max_attempts": 1},
        )
        try:
            self._client = await self._stack.enter_async_context(
                _session().create_client(
                    "sqs",
                    region_name=settings.region,
                    endpoint_url=settings.endpoint_url,
                    aws_access_key_id=_reveal(settings.access_key),
                    aws_secret_access_key=_reveal(settings.secret_key),
                    aws_session_token=_reveal(settings.session_token),
                    verify=settings.ca_file or settings.verify,
                    config=config,
                )
            )
        except (*CONNECTION_ERRORS, ValueError) as exc:
            raise self.translate(exc) from None

    async def close(self) -> None:
        self._client = None
        await self._stack.aclose()

    async def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Send one request. Raises `BrokerUnavailable` or `BrokerRefused`."""
        if self._client is None:
            raise BrokerUnavailable("not connected; call connect() first")
        try:
            answer: dict[str, Any] = await getattr(self._client, operation)(**arguments)
        except Exception as exc:  # noqa: BLE001 - a task that ended looks like an idle queue
            # Not chained: a botocore error may contain the request with all its headers.
            raise self.translate(exc) from None
        return answer

    async def url_of(self, queue: str, *, declare: bool = False) -> str:
        """URL of the queue. A queue that does not exist is refused, or created with `declare`."""
        if queue not in self._urls:
            try:
                self._urls[queue] = (await self.call("get_queue_url", QueueName=queue))["QueueUrl"]
            except BrokerRefused as exc:
                if not declare or ("NonExistentQueue" not in str(exc) and "QueueDoesNotExist" not in str(exc)):
                    raise
                attributes = {"FifoQueue": "true"} if is_fifo(queue) else {}
                made = await self.call("create_queue", QueueName=queue, Attributes=attributes)
                self._urls[queue] = made["QueueUrl"]
        return self._urls[queue]

    def translate(self, exc: BaseException) -> BrokerUnavailable:
        """Convert a botocore error. The result contains no secrets."""
        where = f"SQS at {self.settings.address}"
        if isinstance(exc, ClientError):
            error = exc.response.get("Error", {})
            status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = str(error.get("Code", ""))
            text = f"{where}: {code}: {self._mask(str(error.get('Message', '')))}"
            later = status >= 500 or status == 429 or any(word in code for word in _LATER)
            return BrokerUnavailable(text) if later else BrokerRefused(text)
        text = f"{where}: {self._mask(str(exc)) or type(exc).__name__}"
        refused = (NoCredentialsError, PartialCredentialsError, SSLError, ValueError)
        return BrokerRefused(text) if isinstance(exc, refused) else BrokerUnavailable(text)

    def _mask(self, text: str) -> str:
        for secret in self.settings.secrets():
            text = text.replace(secret, MASK)
        return redact(text)


@cache
def _session() -> Any:
    """One session per process: it caches the service descriptions of AWS, which are slow to load."""
    return get_session()


def is_fifo(queue: str) -> bool:
    return queue.endswith(_FIFO)


def default_dlq_name(queue: str) -> str:
    """`orders-dlq` for `orders`, `orders-dlq.fifo` for `orders.fifo`. SQS allows no other dot in a name."""
    stem = queue.removesuffix(_FIFO)
    return f"{stem}-dlq{queue[len(stem) :]}"


def _reveal(secret: SecretStr | None) -> str | None:
    return secret.get_secret_value() if secret is not None else None


KEY: Final = "x-key"
_ENCODING: Final = "x-body-encoding"
_PACKED: Final = "x-headers"
_RESERVED: Final = (KEY, _ENCODING, _PACKED)
#: Digits of an instant in milliseconds.
_INSTANT_DIGITS: Final = 15
_MAX_ATTRIBUTES: Final = 10
#: Limit of reason and history entries of a dead letter.
_DEAD_TEXT_CHARS: Final = 4_000

_FORBIDDEN: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NAME: Final = re.compile(r"(?!(?i:aws\.|amazon\.))[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_GROUP: Final = re.compile(r"[!-~]{1,128}")
#: Prefixes of group ids for messages without a key, and for keys that are not valid group ids.
_UNKEYED: Final = "holdfast-unkeyed-"
_DIGEST: Final = "holdfast-digest-"


def encode(message: OutgoingMessage, *, fifo: bool) -> dict[str, Any]:
    """Encode an entry for `SendMessageBatch`, without its `Id`. Raises `BrokerRefused` for a tombstone."""
    if message.body is None:
        raise tombstone_refused("SQS")
    body, encoding = _encode_body(message.body)
    own = {_ENCODING: encoding} if encoding else {}
    entry: dict[str, Any] = {"MessageBody": body}
    if fifo:
        group = _group(message.key)
        entry["MessageGroupId"] = group
        entry["MessageDeduplicationId"] = _deduplication_id(message.message_id)
        if group.startswith(_DIGEST):
            own[KEY] = message.key
    elif message.key:
        own[KEY] = message.key
    attributes = {**message.headers, **own}
    if not _fits(attributes):
        attributes = {**own, _PACKED: json.dumps(dict(message.headers))}
    if own.get(KEY) and (not _fits(own) or own[KEY].startswith('"')):
        attributes[KEY] = json.dumps(own[KEY])
    if attributes:
        entry["MessageAttributes"] = {
            name: {"DataType": "String", "StringValue": value} for name, value in attributes.items()
        }
    return entry


def size_of(entry: Mapping[str, Any]) -> int:
    """Size in bytes as SQS counts it: body and attributes with their names and types."""
    attributes = entry.get("MessageAttributes", {}).items()
    return len(entry["MessageBody"].encode()) + sum(
        len(name.encode()) + len("String") + len(value["StringValue"].encode()) for name, value in attributes
    )


def check_size(entry: Mapping[str, Any], limit: int) -> None:
    """Raise `BrokerRefused` if the entry exceeds the limit."""
    if size_of(entry) > limit:
        raise BrokerRefused(
            f"a message of {size_of(entry)} bytes (as SQS counts) exceeds the limit of {limit}; "
            "store the payload elsewhere and send its address"
        )


def decode(received: Mapping[str, Any], queue: str) -> RawMessage:
    """Convert a received message. Never fails, whatever the writer put into it."""
    attributes: Mapping[str, Any] = received.get("MessageAttributes") or {}
    texts = {name.lower(): _text(value) for name, value in attributes.items()}
    system: Mapping[str, str] = received.get("Attributes") or {}
    group = system.get("MessageGroupId", "")
    headers = {name: value for name, value in texts.items() if name not in _RESERVED} | _unpack_headers(
        texts.get(_PACKED)
    )
    sent = system.get("SentTimestamp", "")
    return RawMessage(
        received["MessageId"],
        _decode_body(received.get("Body", ""), texts.get(_ENCODING, "")),
        headers,
        timestamp_from_ms(int(sent)) if sent.isdecimal() and len(sent) <= _INSTANT_DIGITS else datetime.now(UTC),
        {"queue": queue, "receipt_handle": received["ReceiptHandle"], **system},
        _unpack_key(texts.get(KEY)) or ("" if group.startswith(_UNKEYED) else group),
        int(system.get("ApproximateReceiveCount", "1")),
    )


def dead_letter(message: RawMessage, name: str, source: str, reason: str, history: Sequence[str]) -> OutgoingMessage:
    """The message unchanged, plus reason and history."""
    headers = dead_letter_headers(message, source, reason, history, limit=_DEAD_TEXT_CHARS)
    return OutgoingMessage(name, message.body, headers, message.key, f"dead-{message.message_id}")


def _encode_body(body: bytes) -> tuple[str, str]:
    if not body:
        return "empty", "empty"
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = ""
    if text and not _FORBIDDEN.search(text):
        return text, ""
    return b64encode(body).decode(), "base64"


def _decode_body(text: str, encoding: str) -> bytes:
    if encoding == "empty":
        return b""
    if encoding == "base64":
        try:
            return b64decode(text, validate=True)
        except ValueError:
            # A foreign header with the same name.
            return text.encode(errors="replace")
    return text.encode(errors="replace")


def _fits(attributes: Mapping[str, str]) -> bool:
    return len(attributes) <= _MAX_ATTRIBUTES and all(
        _NAME.fullmatch(name) and len(name) <= 256 and value and not _FORBIDDEN.search(value)
        for name, value in attributes.items()
    )


def _unpack_headers(packed: str | None) -> dict[str, str]:
    """Headers from the JSON attribute. A foreign header with the same name is kept as it is."""
    try:
        found = json.loads(packed) if packed else {}
        if isinstance(found, dict):
            return {
                name.lower(): value if isinstance(value, str) else json.dumps(value) for name, value in found.items()
            }
    except (ValueError, RecursionError):
        pass
    return {_PACKED: packed or ""}


def _unpack_key(key: str | None) -> str:
    if key and key.startswith('"'):
        try:
            found = json.loads(key)
        except ValueError:
            return key
        return found if isinstance(found, str) else key
    return key or ""


def _text(value: Mapping[str, Any]) -> str:
    if "StringValue" in value:
        return str(value["StringValue"])
    return bytes(value.get("BinaryValue", b"")).decode(errors="replace")


def _group(key: str) -> str:
    if not key:
        return f"{_UNKEYED}{uuid4().hex}"
    return key if _GROUP.fullmatch(key) else _DIGEST + hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def _deduplication_id(message_id: str) -> str:
    if not message_id:
        return uuid4().hex
    return (
        message_id
        if _GROUP.fullmatch(message_id)
        else hashlib.sha256(message_id.encode(errors="surrogatepass")).hexdigest()
    )
