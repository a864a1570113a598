"""One connection to RabbitMQ, from its opening to its loss, and what its errors mean.

Nothing is mended here: a link that is lost stays lost, and so does all that was in hand on it. Who needs another one
opens it. (aio-pika's robust connections come back by themselves, but say nothing of the messages that were delivered
before: their tags belong to a channel that is no more.)
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
#: Frames that a channel reads ahead, three of them a message. The client's own ten would have it, and all that comes
#: after it, go on with three messages at a time.
_FRAMES: Final = 300
#: Acknowledgements are written once they are for one in so many of the messages in hand, or after so long: the broker
#: sends as many at a time as were acknowledged at a time.
_SHARE: Final = 4
_LINGER_S: Final = 0.005
#: How the broker closes a connection or a channel when it is asked for something that it will not do: no access, no
#: such thing, not like that, no such virtual host.
_REFUSALS: Final = (403, 404, 405, 406, 530)

#: What a call to aio-pika may raise for reasons of the broker or the network.
CONNECTION_ERRORS: Final = (amqp.AMQPError, amqp.ChannelInvalidStateError, OSError, TimeoutError, EOFError)


class RabbitConfig(BaseModel):
    """Where RabbitMQ is and who we are to it: `url`, or `host` and the rest."""

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
    #: Who has to have signed the broker's certificate; none: whom this machine trusts.
    ca_file: str | None = None
    #: Our own certificate, for brokers that ask for one.
    cert_file: str | None = None
    key_file: str | None = None
    #: Whether the broker's certificate has to be valid and for this host.
    verify: bool = True

    #: Make a queue that is not there. What is there stays as it is.
    declare: bool = True
    queue_type: Literal["quorum", "classic"] = "quorum"
    #: Of all consumers of a queue that is made one at a time gets messages: order is kept across processes.
    single_active_consumer: bool = False
    #: The header with the key that says which messages are kept in order.
    key_header: str = "x-key"
    #: What a message without `message_id` is known by. `delivery`: each one counts as a message of its own; nothing is
    #: lost, and what is delivered again is run again, unless a dedup header says that it is the same. `digest`, of all
    #: that it has: of two that are equal the second counts as a duplicate, even if it was sent on purpose.
    without_id: Literal["delivery", "digest"] = "delivery"
    #: Where a publisher writes, with the topic as routing key; none: to the queue named like the topic.
    exchange: str = ""
    #: The broker's own limit (`max_message_size`): larger ones are refused before they cost a connection.
    max_message_bytes: int = Field(default=16 * 1024 * 1024, ge=1)

    #: How long one answer of the broker may take.
    timeout_s: float = Field(default=10.0, gt=0)
    #: A connection on which nothing was heard for three times as long is lost.
    heartbeat_s: int = Field(default=10, ge=1, le=600)

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> Self:
        if self.url is not None:
            doubled = {"host", "port", "user", "password", "virtual_host", "tls"} & self.model_fields_set
            if doubled:
                raise ValueError(f"the url says it already: leave out {', '.join(sorted(doubled))}")
            try:
                parsed = URL(self.url.get_secret_value())
            except ValueError:
                raise ValueError("url: cannot be read") from None
            if parsed.scheme not in ("amqp", "amqps") or not parsed.host:
                raise ValueError("url: must be amqp://user:password@host:port/virtual-host, or amqps://…")
        if self.key_file and not self.cert_file:
            raise ValueError("key_file: needs its cert_file")
        return self

    @property
    def address(self) -> str:
        """For people: no credentials."""
        url = self.full_url()
        return f"{url.host}:{url.port or (5671 if self.secure else 5672)}"

    @property
    def secure(self) -> bool:
        return self.full_url().scheme == "amqps"

    def full_url(self) -> URL:
        """With the password: not for people."""
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
        """What must not be seen in any text."""
        known = [self.password.get_secret_value(), self.full_url().password or "", self.full_url().raw_password or ""]
        return [secret for secret in known if secret and secret != "guest"]


class RabbitConnection:
    """A living connection."""

    def __init__(self, settings: RabbitConfig, connection: AbstractConnection) -> None:
        self.settings = settings
        self._connection = connection
        #: Set once anything on it can no longer be relied on.
        self.lost = asyncio.Event()
        self.reason = ""
        connection.close_callbacks.add(lambda _, exc: self.fail(exc))

    @classmethod
    async def open(cls, settings: RabbitConfig) -> Self:
        """Connect; `BrokerUnavailable` or `BrokerRefused` says why not."""
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
            # aio-pika's word for a connection that was closed in the meantime.
            raise BrokerUnavailable(f"RabbitMQ at {self.settings.address}: the connection is lost") from exc

    def fail(self, exc: BaseException | None) -> None:
        """It is lost, for this reason."""
        if not self.lost.is_set():
            self.reason = _text(exc, self.settings) if exc is not None else "closed"
            self.lost.set()

    async def close(self) -> None:
        """Whatever state it is in. Everything that is in hand on it is for others from now on."""
        self.fail(None)
        closing = asyncio.ensure_future(self._connection.close())
        done, _ = await asyncio.wait({closing}, timeout=_CLOSE_S)
        if done and not closing.cancelled():
            # What goes wrong with a farewell is of no interest, but has to be looked at.
            closing.exception()
        closing.cancel()


class RabbitConsumerConnection(RabbitConnection):
    """A link with a channel for deliveries, and another one for questions and dead letters."""

    deliveries: Channel
    #: The broker's name for our consumer; empty: none.
    consumer_tag = ""
    _settler: asyncio.Task[None] | None = None

    def begin(self, deliveries: Channel) -> None:
        """Take deliveries on this channel: if it goes, all goes."""
        self.opened_at = asyncio.get_running_loop().time()
        self.deliveries = deliveries
        #: Tags of what was delivered and is not settled, in order.
        self.in_hand: dict[int, None] = {}
        #: Queues that are known to be there.
        self.known: set[str] = set()
        self._settled: list[int] = []
        self._refused: list[tuple[int, bool]] = []
        self._news = asyncio.Event()
        self._reminder: asyncio.TimerHandle | None = None
        self._closing = False
        self._side: Channel | None = None
        self._opening_side = asyncio.Lock()
        deliveries.closing.add_done_callback(lambda closed: self.fail(_why(closed)))
        deliveries.on_consumer_cancel_callbacks.add(lambda _: self.fail(ConnectionError("the queue is gone")))
        self._settler = asyncio.create_task(self._settle(), name="rabbitmq-settler")

    def ack(self, tag: int) -> None:
        """Acknowledge it, soon."""
        del self.in_hand[tag]
        self._settled.append(tag)
        if len(self._settled) * _SHARE >= len(self.in_hand):
            self._news.set()
        elif self._reminder is None:
            self._reminder = asyncio.get_running_loop().call_later(_LINGER_S, self._news.set)

    def nack(self, tag: int, requeue: bool) -> None:
        """Give it back, or have it dropped, soon."""
        del self.in_hand[tag]
        self._refused.append((tag, requeue))
        self._news.set()

    async def side_channel(self) -> Channel:
        """A mistake on a channel closes it: questions must not cost the one with the deliveries."""
        async with self._opening_side:
            if self._side is None or self._side.is_closed:
                self._side = await self.channel()
            return self._side

    async def close(self) -> None:
        if self._settler is not None:
            self._closing = True
            self._news.set()
            # It writes what is settled before it ends, unless the link is lost anyway.
            await asyncio.wait({self._settler}, timeout=0 if self.lost.is_set() else self.settings.timeout_s)
            self._settler.cancel()
        await super().close()

    async def _settle(self) -> None:
        while self._settled or self._refused or not self._closing:
            if not self._closing:
                await self._news.wait()
                self._news.clear()
                # What else is settled in this turn of the loop goes along.
                await asyncio.sleep(0)
            if self._reminder is not None:
                self._reminder.cancel()
                self._reminder = None
            try:
                await self._write_settled()
            except CONNECTION_ERRORS as exc:
                self.fail(exc)
                return

    async def _write_settled(self) -> None:
        """One frame says "all up to here" for most; refused ones go first, so that it does not mean them."""
        # Looked up before anything is awaited: what is refused from now on is written later, and must not be meant.
        lowest = next(iter(self.in_hand), None)
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
    """The port's error for one of aio-pika's, with nothing secret in it."""
    text = f"RabbitMQ at {settings.address}: {_text(exc, settings)}"
    if isinstance(exc, amqp.ProbableAuthenticationError | amqp.AuthenticationError):
        return BrokerRefused(f"{text}; check user, password and virtual_host")
    if isinstance(exc, amqp.InvalidFrameError):
        # Closed instead of opened, and aiormq does not pass on why.
        return BrokerRefused(
            f"RabbitMQ at {settings.address} closes the connection that was to be opened; check virtual_host and user"
        )
    if isinstance(exc, ssl.SSLError) or isinstance(exc.__cause__, ssl.SSLError):
        return BrokerRefused(f"{text}; check ca_file, cert_file and the host's name")
    if _code(exc) in _REFUSALS:
        return BrokerRefused(text)
    return BrokerUnavailable(text)


def safe_cause(exc: BaseException, settings: RabbitConfig) -> BaseException | None:
    """The cause to be shown with an error; none, if its own text would give something away."""
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
    said = " ".join(word for word in exc.args if isinstance(word, str))
    return mask_secrets(said or type(exc).__name__, settings.secrets())


def mask_secrets(text: str, secrets: Iterable[str]) -> str:
    """The text without the secrets, whether they look like secrets or not."""
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


def _why(closed: asyncio.Future[Any]) -> BaseException | None:
    return None if closed.cancelled() else closed.exception()
