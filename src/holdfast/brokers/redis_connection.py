"""Redis Streams settings, error translation, entry encoding, and the publisher.

The entry field `body` (else `payload`, else `data`) is the body and `key` is the key; all other fields are headers.
`RedisPublisher` appends the messages of one call in one transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, RedisError, ResponseError

from holdfast.brokers.port import OutgoingMessage, Publisher, RawMessage, timestamp_from_ms, tombstone_refused
from holdfast.errors import BrokerRefused, BrokerUnavailable
from holdfast.observe.redact import redact

#: Candidates for the body field; the first one present wins.
_BODIES: Final = (b"body", b"payload", b"data")
_KEY: Final = b"key"
#: Fields that are not headers, so a header cannot have these names.
RESERVED_FIELDS: Final = frozenset({"body", "key"})

_SCHEMES: Final = ("redis://", "rediss://", "unix://")

#: Fragments of Redis errors that are refusals, and their explanation.
_REFUSALS: Final[Mapping[str, str]] = {
    "WRONGPASS": "Redis refuses this user name or password",
    "NOAUTH": "Redis requires a password",
    "invalid username-password": "Redis refuses this user name or password",
    "AUTH <password> called without any password": "Redis has no password configured, but one was sent",
    "NOPERM": "the Redis user lacks permissions for these commands or keys",
    "no permissions": "the Redis user lacks permissions for these commands or keys",
    "WRONGTYPE": "the key exists but is not a stream",
}


class RedisConfig(BaseModel):
    """Address, credentials and timeouts of Redis, and stream options."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    #: `redis://host:port/db`, `rediss://…` for TLS, `unix:///path`. User and password may be in it.
    url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    username: str | None = None
    password: SecretStr | None = None

    #: For `rediss`: CA certificates (default: the system's trust store), and the client certificate if required.
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    verify: bool = True

    connect_timeout_s: float = Field(5.0, gt=0)
    reply_timeout_s: float = Field(10.0, gt=0)

    #: Messages of a consumer that was silent for this time are reclaimed by others.
    visibility_timeout_s: float = Field(30.0, gt=0)
    #: Delete acknowledged entries. Only if the group is the stream's only reader.
    delete_acknowledged: bool = False
    #: Publishing trims the stream to about this many entries, read or not. None: never trim.
    max_length: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        url = self.url.get_secret_value()
        if not url.startswith(_SCHEMES):
            raise ValueError(f"url must start with one of {', '.join(_SCHEMES)}")
        try:
            _ = urlsplit(url).port
        except ValueError:
            # The original error may contain the password.
            raise ValueError("url is not valid; write special characters of user and password as %XX") from None
        files_given = self.ca_file or self.cert_file or self.key_file or not self.verify
        if files_given and not url.startswith("rediss://"):
            raise ValueError("ca_file, cert_file, key_file and verify require a rediss:// url")
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file and key_file must be set together")
        return self

    def client(self) -> Any:
        """A client that connects on first use and does not retry.

        Returns `Any`: the types of redis-py leave open whether replies are bytes or text.
        """
        url = self.url.get_secret_value()
        options: dict[str, Any] = {
            "username": self.username,
            "password": None if self.password is None else self.password.get_secret_value(),
            "socket_connect_timeout": self.connect_timeout_s,
            "socket_timeout": self.reply_timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if url.startswith("rediss://"):
            options |= {
                "ssl_ca_certs": self.ca_file,
                "ssl_certfile": self.cert_file,
                "ssl_keyfile": self.key_file,
                "ssl_cert_reqs": "required" if self.verify else "none",
                "ssl_check_hostname": self.verify,
            }
        return Redis.from_url(url, **options)


#: Errors of client calls that `translate` converts.
REDIS_ERRORS: Final = (RedisError, OSError, TimeoutError)


def translate(exc: Exception) -> BrokerUnavailable:
    """Convert a client error."""
    # Redis quotes the arguments of an unknown command, which may be AUTH.
    text = redact(str(exc).partition(", with args beginning with")[0])
    if isinstance(exc, ResponseError | AuthenticationError | AuthorizationError):
        for word, advice in _REFUSALS.items():
            if word in text:
                return BrokerRefused(f"{advice} (Redis says: {text})")
        return BrokerUnavailable(f"Redis refused a command: {text}")
    return BrokerUnavailable(f"cannot reach Redis: {text or type(exc).__name__}; check the address and that it runs")


def script(name: str) -> str:
    """Source of a script in `lua/`, with the prelude."""
    folder = files("holdfast.brokers") / "lua"
    return "\n".join((folder / f"{part}.lua").read_text() for part in ("_prelude", name))


def to_message(
    entry_id: bytes, fields: Iterable[tuple[bytes, bytes]], metadata: Mapping[str, Any], deliveries: int
) -> RawMessage:
    """Convert an entry. An entry without a body field has an empty body."""
    values = dict(fields)
    body_field = next((name for name in _BODIES if name in values), None)
    headers = {_text(name).lower(): _text(value) for name, value in values.items() if name not in (body_field, _KEY)}
    name = entry_id.decode()
    return RawMessage(
        message_id=name,
        body=b"" if body_field is None else values[body_field],
        headers=headers,
        timestamp=timestamp_from_ms(int(name.partition("-")[0])),
        metadata={**metadata, "entry_id": name},
        key=_text(values.get(_KEY, b"")),
        deliveries=deliveries,
    )


def to_fields(body: bytes, headers: Mapping[str, str], key: str) -> list[bytes]:
    """The fields of an entry as a flat list of names and values."""
    fields: list[bytes] = [b"body", body]
    if key:
        fields += [_KEY, key.encode()]
    for name, value in headers.items():
        fields += [name.encode(), value.encode()]
    return fields


def pairs(flat: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    """Pairs from a flat list of names and values."""
    return zip(flat[::2], flat[1::2], strict=True)


def entry_position(message: RawMessage) -> tuple[int, int]:
    """Position of the message in its stream."""
    time, _, sequence = message.message_id.partition("-")
    return int(time), int(sequence)


def next_entry_id(entry_id: bytes) -> str:
    """The smallest id after this one."""
    time, _, sequence = entry_id.decode().partition("-")
    return f"{time}-{int(sequence) + 1}"


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


class RedisPublisher(Publisher):
    """Publisher to streams. One call is one transaction."""

    def __init__(self, connection: RedisConfig) -> None:
        self._connection = connection
        self._client = connection.client()

    def __repr__(self) -> str:
        return "RedisPublisher()"

    async def connect(self) -> None:
        try:
            await self._client.ping()
        except REDIS_ERRORS as exc:
            raise translate(exc) from None

    async def publish(self, messages: Sequence[OutgoingMessage]) -> list[BrokerUnavailable | None]:
        answers = _find_invalid(messages)
        fit = [index for index, answer in enumerate(answers) if answer is None]
        if not fit:
            return answers
        try:
            async with asyncio.timeout(2 * self._connection.reply_timeout_s):
                replies = await self._append([messages[index] for index in fit])
        except REDIS_ERRORS as exc:
            replies = [exc] * len(fit)
        for index, reply in zip(fit, replies, strict=True):
            if isinstance(reply, Exception):
                answers[index] = translate(reply)
        return answers

    async def health_check(self) -> bool:
        try:
            return bool(await self._client.ping())
        except REDIS_ERRORS:
            return False

    async def close(self) -> None:
        await self._client.aclose()

    async def _append(self, messages: Iterable[OutgoingMessage]) -> list[Any]:
        # In a transaction, so that a server that runs out of memory midway refuses all of them.
        async with self._client.pipeline(transaction=True) as pipe:
            limit = self._connection.max_length
            trim = () if limit is None else ("MAXLEN", "~", limit)
            for message in messages:
                fields = to_fields(message.body or b"", message.headers, message.key)
                pipe.execute_command("XADD", message.topic, *trim, "*", *fields)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
            return replies


def _find_invalid(messages: Sequence[OutgoingMessage]) -> list[BrokerUnavailable | None]:
    """Errors of messages that cannot be written, and of later ones with the same key."""
    failed: set[tuple[str, str]] = set()
    answers: list[BrokerUnavailable | None] = []
    for message in messages:
        answer: BrokerUnavailable | None = None
        ordered_by = (message.topic, message.key)
        if not RESERVED_FIELDS.isdisjoint(message.headers):
            answer = BrokerRefused(f"headers on Redis Streams cannot be named {' or '.join(sorted(RESERVED_FIELDS))}")
        elif message.body is None:
            answer = tombstone_refused("Redis Streams")
        elif message.key and ordered_by in failed:
            answer = BrokerUnavailable("an earlier message with the same key was not written")
        if answer is not None:
            failed.add(ordered_by)
        answers.append(answer)
    return answers
