"""RabbitMQ settings, connections, batched acknowledgements and error translation.

A lost connection is not reopened, and its messages in flight are lost with it; the caller opens another one. aio-pika's
robust connections reconnect by themselves, but do not report that delivery tags of the old channel are invalid.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import Any, Final, Literal, Self

import aio_pika
from aio_pika.abc import AbstractConnection
from aiormq import Channel
from aiormq import exceptions as amqp
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from yarl import URL

from holdfast.errors import BrokerRefused, BrokerUnavailable
from holdfast.observe.redact import MASK, redact

_CLOSE_S: Final = 3.0
#: Frames that a channel buffers; a message is three frames. The client's default of ten would limit a consumer to
#: three messages at a time.
_FRAMES: Final = 300
#: Acknowledgements are written once they cover 1/N of the messages in flight, or after `_LINGER_S`: with
#: small batches of acknowledgements the broker would also send small batches of messages.
_ACK_FRACTION: Final = 4
_LINGER_S: Final = 0.005
#: Reply codes of refusals: access refused, not found, resource locked, precondition failed, not allowed.
_REFUSALS: Final = (403, 404, 405, 406, 530)

#: Errors of aio-pika calls that are caused by the broker or the network.
CONNECTION_ERRORS: Final = (amqp.AMQPError, amqp.ChannelInvalidStateError, OSError, TimeoutError, EOFError)


class RabbitConfig(BaseModel):
    """Address, credentials, options and limits of RabbitMQ. Set `url`, or `host` and the other address fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    #: amqp://user:password@host:port/virtual-host, or amqps://…
    url: SecretStr | None = None
    host: str = "localhost"
    #: 5672, or 5671 with TLS.
    port: int | None = Field(default=None, ge=1, le=65535)
    user: str = "guest"
    password: SecretStr = SecretStr("guest")
    virtual_host: str = "/"
    tls: bool = False
    #: CA certificates that verify the broker. Default: the system's trust store.
    ca_file: str | None = None
    #: Client certificate, for brokers that require one.
    cert_file: str | None = None
    key_file: str | None = None
    #: Verify the broker's certificate and host name.
    verify: bool = True

    #: Declare a queue that does not exist. An existing queue stays unchanged.
    declare: bool = True
    queue_type: Literal["quorum", "classic"] = "quorum"
    #: For declared queues: only one consumer at a time receives messages, which keeps order across processes.
    single_active_consumer: bool = False
    #: Header with the ordering key.
    key_header: str = "x-key"
    #: Identity of a message without `message_id`. `delivery`: each delivery counts as a new message; nothing is lost,
    #: and a redelivery runs again unless a dedup header identifies it. `digest`: a hash of the whole message; of two
    #: equal messages the second counts as a duplicate, even if it was sent on purpose.
    without_id: Literal["delivery", "digest"] = "delivery"
    #: Exchange for publishing, with the topic as routing key. Empty: publish to the queue named like the topic.
    exchange: str = ""
    #: The broker's own limit (`max_message_size`). Larger messages are refused before the broker closes the connection.
    max_message_bytes: int = Field(default=16 * 1024 * 1024, ge=1)

    #: Timeout for one answer of the broker.
    timeout_s: float = Field(default=10.0, gt=0)
    #: A connection that is silent for three times as long is lost.
    heartbeat_s: int = Field(default=10, ge=1, le=600)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.url is not None:
            doubled = {"host", "port", "user", "password", "virtual_host", "tls"} & self.model_fields_set
            if doubled:
                raise ValueError(f"url already contains the address; remove {', '.join(sorted(doubled))}")
            try:
                parsed = URL(self.url.get_secret_value())
            except ValueError:
                raise ValueError("url is not valid") from None
            if parsed.scheme not in ("amqp", "amqps") or not parsed.host:
                raise ValueError("url must be amqp://user:password@host:port/virtual-host, or amqps://…")
        if self.key_file and not self.cert_file:
            raise ValueError("key_file needs its cert_file")
        return self

    @property
    def address(self) -> str:
        """Host and port, without credentials: safe to log."""
        url = self.full_url()
        return f"{url.host}:{url.port or (5671 if self.secure else 5672)}"

    @property
    def secure(self) -> bool:
        return self.full_url().scheme == "amqps"

    def full_url(self) -> URL:
        """The URL with the password: never log it."""
        if self.url is not None:
            return URL(self.url.get_secret_value())
        return URL.build(
            scheme="amqps" if self.tls else "amqp",
            host=self.host,
            port=self.port or (5671 if self.tls else 5672),
            user=self.user,
            password=self.password.get_secret_value(),
            path="/" + self.virtual_host.replace("/", "%2F"),
            encoded=False,
        )

    def secrets(self) -> list[str]:
        """Values to mask in any text."""
        known = [self.password.get_secret_value(), self.full_url().password or "", self.full_url().raw_password or ""]
        return [secret for secret in known if secret and secret != "guest"]


class RabbitConnection:
    """One open connection."""

    def __init__(self, settings: RabbitConfig, connection: AbstractConnection) -> None:
        self.settings = settings
        self._connection = connection
        #: Set once the connection is no longer usable.
        self.lost = asyncio.Event()
        self.reason = ""
        connection.close_callbacks.add(lambda _, exc: self.fail(exc))

    @classmethod
    async def open(cls, settings: RabbitConfig) -> Self:
        """Connect. Raises `BrokerUnavailable` or `BrokerRefused`."""
        try:
            context = _ssl_context(settings) if settings.secure else None
            url = settings.full_url().update_query(heartbeat=settings.heartbeat_s)
            async with asyncio.timeout(settings.timeout_s):
                return cls(settings, await aio_pika.connect(url, ssl_context=context))
        except CONNECTION_ERRORS as exc:
            raise translate(exc, settings) from safe_cause(exc, settings)

    async def channel(self) -> Channel:
        """A channel with publisher confirms, on which an unroutable message is an error."""
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                transport = self._connection.transport
                if transport is None:
                    raise RuntimeError("closed")
                channel = await transport.connection.channel(
                    publisher_confirms=True, on_return_raises=True, frame_buffer_size=_FRAMES
                )
                assert isinstance(channel, Channel)
                return channel
        except CONNECTION_ERRORS as exc:
            raise translate(exc, self.settings) from safe_cause(exc, self.settings)
        except RuntimeError as exc:
            # aio-pika raises it if the connection was closed meanwhile.
            raise BrokerUnavailable(f"RabbitMQ at {self.settings.address}: connection lost") from exc

    def fail(self, exc: BaseException | None) -> None:
        """Mark the connection as lost. The first reason is kept."""
        if not self.lost.is_set():
            self.reason = _text(exc, self.settings) if exc is not None else "closed"
            self.lost.set()

    async def close(self) -> None:
        """Close in any state. Messages in flight go to other consumers."""
        self.fail(None)
        closing = asyncio.ensure_future(self._connection.close())
        done, _ = await asyncio.wait({closing}, timeout=_CLOSE_S)
        if done and not closing.cancelled():
            # Errors at close do not matter, but must be retrieved or asyncio logs them.
            closing.exception()
        closing.cancel()


class RabbitConsumerConnection(RabbitConnection):
    """A connection with one channel for deliveries and another for queries and dead letters."""

    deliveries: Channel
    #: Tag of the consumer. Empty: not consuming.
    consumer_tag = ""
    _settler: asyncio.Task[None] | None = None

    def begin(self, deliveries: Channel) -> None:
        """Receive deliveries on this channel. If it closes, the connection counts as lost."""
        self.opened_at = asyncio.get_running_loop().time()
        self.deliveries = deliveries
        #: Delivery tags in flight, in order.
        self.in_flight: dict[int, None] = {}
        #: Queues known to exist.
        self.known: set[str] = set()
        self._settled: list[int] = []
        self._refused: list[tuple[int, bool]] = []
        self._wakeup = asyncio.Event()
        self._linger_timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._side: Channel | None = None
        self._opening_side = asyncio.Lock()
        deliveries.closing.add_done_callback(lambda closed: self.fail(_get_error(closed)))
        deliveries.on_consumer_cancel_callbacks.add(
            lambda _: self.fail(ConnectionError("the broker cancelled the consumer"))
        )
        self._settler = asyncio.create_task(self._settle(), name="rabbitmq-settler")

    def ack(self, tag: int) -> None:
        """Acknowledge a message with the next batch."""
        del self.in_flight[tag]
        self._settled.append(tag)
        if len(self._settled) * _ACK_FRACTION >= len(self.in_flight):
            self._wakeup.set()
        elif self._linger_timer is None:
            self._linger_timer = asyncio.get_running_loop().call_later(_LINGER_S, self._wakeup.set)

    def nack(self, tag: int, requeue: bool) -> None:
        """Requeue or drop a message with the next batch."""
        del self.in_flight[tag]
        self._refused.append((tag, requeue))
        self._wakeup.set()

    async def side_channel(self) -> Channel:
        """The channel for queries: an error closes its channel, which must not be the one of the deliveries."""
        async with self._opening_side:
            if self._side is None or self._side.is_closed:
                self._side = await self.channel()
            return self._side

    async def close(self) -> None:
        if self._settler is not None:
            self._closing = True
            self._wakeup.set()
            # It writes pending acknowledgements before it ends, unless the connection is lost.
            await asyncio.wait({self._settler}, timeout=0 if self.lost.is_set() else self.settings.timeout_s)
            self._settler.cancel()
        await super().close()

    async def _settle(self) -> None:
        while self._settled or self._refused or not self._closing:
            if not self._closing:
                await self._wakeup.wait()
                self._wakeup.clear()
                # Include messages settled in the same iteration of the event loop.
                await asyncio.sleep(0)
            if self._linger_timer is not None:
                self._linger_timer.cancel()
                self._linger_timer = None
            try:
                await self._write_settled()
            except CONNECTION_ERRORS as exc:
                self.fail(exc)
                return

    async def _write_settled(self) -> None:
        """Write pending acknowledgements, most of them in one frame with `multiple`.

        Refusals are written first, so that the frame does not cover them.
        """
        # Read before the first await: messages refused from now on are written later and must not be covered.
        lowest = next(iter(self.in_flight), None)
        refused, self._refused = self._refused, []
        settled, self._settled = sorted(self._settled), []
        for tag, requeue in refused:
            await self.deliveries.basic_nack(tag, requeue=requeue, wait=True)
        together = [tag for tag in settled if lowest is None or tag < lowest]
        if together:
            await self.deliveries.basic_ack(together[-1], multiple=True, wait=True)
        for tag in settled[len(together) :]:
            await self.deliveries.basic_ack(tag, wait=tag == settled[-1])


def translate(exc: BaseException, settings: RabbitConfig) -> BrokerUnavailable:
    """Convert an aio-pika error. The result contains no secrets."""
    text = f"RabbitMQ at {settings.address}: {_text(exc, settings)}"
    if isinstance(exc, amqp.ProbableAuthenticationError | amqp.AuthenticationError):
        return BrokerRefused(f"{text}; check user, password and virtual_host")
    if isinstance(exc, amqp.InvalidFrameError):
        # The broker closed the connection during the handshake; aiormq does not report why.
        return BrokerRefused(
            f"RabbitMQ at {settings.address} closed the connection during the handshake; check virtual_host and user"
        )
    if isinstance(exc, ssl.SSLError) or isinstance(exc.__cause__, ssl.SSLError):
        return BrokerRefused(f"{text}; check ca_file, cert_file and the host name")
    if _code(exc) in _REFUSALS:
        return BrokerRefused(text)
    return BrokerUnavailable(text)


def safe_cause(exc: BaseException, settings: RabbitConfig) -> BaseException | None:
    """The exception to chain; None if its text contains a secret."""
    text = repr(exc)
    return None if any(secret in text for secret in settings.secrets()) else exc


def _code(exc: BaseException) -> int | None:
    for kind, code in (
        (amqp.ChannelAccessRefused, 403),
        (amqp.ChannelNotFoundEntity, 404),
        (amqp.ChannelLockedResource, 405),
        (amqp.ChannelPreconditionFailed, 406),
        (amqp.ConnectionNotAllowed, 530),
    ):
        if isinstance(exc, kind):
            return code
    first = exc.args[0] if exc.args else None
    return first if isinstance(exc, amqp.ConnectionClosed | amqp.ChannelClosed) and isinstance(first, int) else None


def _text(exc: BaseException, settings: RabbitConfig) -> str:
    if isinstance(exc, TimeoutError) and not exc.args:
        return f"no answer within {settings.timeout_s:g} s"
    text = " ".join(arg for arg in exc.args if isinstance(arg, str))
    return mask_secrets(text or type(exc).__name__, settings.secrets())


def mask_secrets(text: str, secrets: Iterable[str]) -> str:
    """Mask the given secrets, and whatever else looks like a secret."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    return redact(text)


def _ssl_context(settings: RabbitConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
        if settings.cert_file:
            context.load_cert_chain(settings.cert_file, settings.key_file)
    except OSError as exc:
        files = ", ".join(filter(None, (settings.ca_file, settings.cert_file, settings.key_file)))
        raise BrokerRefused(f"TLS to RabbitMQ at {settings.address}: cannot use {files}: {exc.strerror}") from exc
    if not settings.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _get_error(closed: asyncio.Future[Any]) -> BaseException | None:
    return None if closed.cancelled() else closed.exception()
