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

#: Which field is the body: the first of these that an entry has.
_BODIES: Final = (b"body", b"payload", b"data")
_KEY: Final = b"key"
#: Fields that are no headers; so no header can have such a name.
TAKEN: Final = frozenset({"body", "key"})

_SCHEMES: Final = ("redis://", "rediss://", "unix://")

#: Words in Redis's errors by which it refuses, and what to do.
_REFUSALS: Final[Mapping[str, str]] = {
    "WRONGPASS": "Redis refuses this user name or password",
    "NOAUTH": "Redis wants a password",
    "invalid username-password": "Redis refuses this user name or password",
    "AUTH <password> called without any password": "this Redis knows no passwords, and was given one",
    "NOPERM": "the Redis user lacks permissions for these commands or keys",
    "no permissions": "the Redis user lacks permissions for these commands or keys",
    "WRONGTYPE": "the key is there, but is no stream",
}


class RedisConfig(BaseModel):
    """Where Redis is, and how its streams are used."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    #: `redis://host:port/db`, `rediss://…` for TLS, `unix:///path`. User and password may be in it.
    url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    username: str | None = None
    password: SecretStr | None = None

    #: For `rediss`: who signed the server's certificate (else whom the system trusts); our own, if the server asks.
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    verify: bool = True

    connect_timeout_s: float = Field(5.0, gt=0)
    reply_timeout_s: float = Field(10.0, gt=0)

    #: A consumer that was silent for so long has died, and others take over what it had.
    visibility_timeout_s: float = Field(30.0, gt=0)
    #: Delete what is acknowledged. Only where the group is the stream's only reader.
    delete_acknowledged: bool = False
    #: What is published trims its stream to about so many entries, read or not. None: streams are never trimmed.
    max_length: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        url = self.url.get_secret_value()
        if not url.startswith(_SCHEMES):
            raise ValueError(f"url must begin with one of {', '.join(_SCHEMES)}")
        try:
            _ = urlsplit(url).port
        except ValueError:
            # Its own words may show the password.
            raise ValueError("url cannot be read: write special characters of user and password as %XX") from None
        files_given = self.ca_file or self.cert_file or self.key_file or not self.verify
        if files_given and not url.startswith("rediss://"):
            raise ValueError("ca_file, cert_file, key_file and verify are for a url that begins with rediss://")
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file and key_file belong together")
        return self

    def client(self) -> Any:
        """A client that connects when it is first used, and tries everything once. Typed loosely: the client's own
        types leave open whether replies are bytes or text."""
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


#: What a call on a client may raise that `translate` knows.
REDIS_ERRORS: Final = (RedisError, OSError, TimeoutError)


def translate(exc: Exception) -> BrokerUnavailable:
    """What the caller should know and do."""
    # Redis quotes the arguments of a command that it does not know; AUTH may be one.
    text = redact(str(exc).partition(", with args beginning with")[0])
    if isinstance(exc, ResponseError | AuthenticationError | AuthorizationError):
        for word, advice in _REFUSALS.items():
            if word in text:
                return BrokerRefused(f"{advice} (Redis says: {text})")
        return BrokerUnavailable(f"Redis refused a command: {text}")
    return BrokerUnavailable(f"Redis cannot be reached: {text or type(exc).__name__}; is it running at this address?")


def script(name: str) -> str:
    """The source of one of the scripts beside this module."""
    folder = files("holdfast.brokers") / "lua"
    return "\n".join((folder / f"{part}.lua").read_text() for part in ("_common", name))


def to_message(
    entry_id: bytes, fields: Iterable[tuple[bytes, bytes]], metadata: Mapping[str, Any], deliveries: int
) -> RawMessage:
    """The message of an entry. One without a body has an empty one."""
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
    """The fields of an entry, names and values in turn."""
    fields: list[bytes] = [b"body", body]
    if key:
        fields += [_KEY, key.encode()]
    for name, value in headers.items():
        fields += [name.encode(), value.encode()]
    return fields


def pairs(flat: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    """Names and values in turn, two by two."""
    return zip(flat[::2], flat[1::2], strict=True)


def entry_position(message: RawMessage) -> tuple[int, int]:
    """Where in the stream it is."""
    time, _, sequence = message.message_id.partition("-")
    return int(time), int(sequence)


def after(entry_id: bytes) -> str:
    """The smallest id after this one."""
    time, _, sequence = entry_id.decode().partition("-")
    return f"{time}-{int(sequence) + 1}"


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


class RedisPublisher(Publisher):
    """Appends to streams; one call is one transaction."""

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
        answers = _unfit(messages)
        fit = [place for place, answer in enumerate(answers) if answer is None]
        if not fit:
            return answers
        try:
            async with asyncio.timeout(2 * self._connection.reply_timeout_s):
                replies = await self._append([messages[place] for place in fit])
        except REDIS_ERRORS as exc:
            replies = [exc] * len(fit)
        for place, reply in zip(fit, replies, strict=True):
            if isinstance(reply, Exception):
                answers[place] = translate(reply)
        return answers

    async def health_check(self) -> bool:
        try:
            return bool(await self._client.ping())
        except REDIS_ERRORS:
            return False

    async def close(self) -> None:
        await self._client.aclose()

    async def _append(self, messages: Iterable[OutgoingMessage]) -> list[Any]:
        # A transaction: a server that fills up in the middle takes none of them, not the later ones only.
        async with self._client.pipeline(transaction=True) as pipe:
            limit = self._connection.max_length
            trim = () if limit is None else ("MAXLEN", "~", limit)
            for message in messages:
                fields = to_fields(message.body or b"", message.headers, message.key)
                pipe.execute_command("XADD", message.topic, *trim, "*", *fields)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
            return replies


def _unfit(messages: Sequence[OutgoingMessage]) -> list[BrokerUnavailable | None]:
    """Why a message cannot be written at all, and with it the later ones of its key."""
    failed: set[tuple[str, str]] = set()
    answers: list[BrokerUnavailable | None] = []
    for message in messages:
        answer: BrokerUnavailable | None = None
        line = (message.topic, message.key)
        if not TAKEN.isdisjoint(message.headers):
            answer = BrokerRefused(f"a message on Redis Streams cannot have headers named {' or '.join(sorted(TAKEN))}")
        elif message.body is None:
            answer = tombstone_refused("Redis Streams")
        elif message.key and line in failed:
            answer = BrokerUnavailable("an earlier message of this key was not written")
        if answer is not None:
            failed.add(line)
        answers.append(answer)
    return answers
