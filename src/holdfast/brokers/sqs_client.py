"""How SQS is reached and who we are to it, what its errors mean, and that no log shows a credential."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from functools import cache
from typing import Any, Final

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

from holdfast.errors import BrokerRefused, BrokerUnavailable
from holdfast.observe.redact import BLOT, redact

#: What a call may raise for reasons of SQS or the network.
TROUBLES: Final = (BotoCoreError, ClientError, OSError, TimeoutError)

#: Most messages in one request.
BATCH: Final = 10

_FIFO: Final = ".fifo"
#: Answers that say "later", though they look like a refusal.
_LATER: Final = ("Throttl", "TooManyRequests", "RequestLimitExceeded", "OverLimit", "SlowDown")


class SqsConnection(BaseModel):
    """Where SQS is and who we are to it. Without keys: as this machine is known to AWS (environment, profile, role)."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    region: str = "us-east-1"
    #: Another server that speaks SQS; none: AWS itself.
    endpoint_url: str | None = None
    access_key: SecretStr | None = None
    secret_key: SecretStr | None = None
    session_token: SecretStr | None = None
    #: Who has to have signed the server's certificate; none: whom botocore trusts.
    ca_file: str | None = None
    verify: bool = True

    #: Make a queue that is not there. What is there stays as it is.
    declare: bool = False
    #: The same for the queue of the dead letters, when the first one is written.
    declare_dlq: bool = True
    #: For so long a message is ours; while it is in hand that is prolonged, again and again.
    visibility_timeout_s: int = Field(default=30, ge=1, le=43_200)
    #: How long one question for messages waits for the first; 0: it is asked again and again, which costs more.
    wait_time_s: int = Field(default=20, ge=0, le=20)
    #: Questions for messages at the same time, while there are many.
    receives: int = Field(default=4, ge=1, le=50)
    #: SQS's own limit for a message with all its attributes, and for a batch.
    max_message_bytes: int = Field(default=262_144, ge=1024)
    #: How long any other answer may take.
    timeout_s: float = Field(default=10.0, gt=0)

    @field_validator("endpoint_url")
    @classmethod
    def _has_no_credentials(cls, url: str | None) -> str | None:
        if url is not None and "@" in url:
            raise ValueError("an address with credentials in it ends up in logs; use access_key and secret_key")
        return url

    @property
    def address(self) -> str:
        """For people: no credentials."""
        return redact(self.endpoint_url or f"region {self.region}")

    def secrets(self) -> list[str]:
        """What must not be seen in any text."""
        given = (self.access_key, self.secret_key, self.session_token)
        return [secret.get_secret_value() for secret in given if secret is not None and secret.get_secret_value()]


class _Blotter(logging.Filter):
    """botocore writes requests with all their headers into its log, at level DEBUG: a session token is one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.secrets: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if any(secret in text for secret in self.secrets):
            for secret in self.secrets:
                text = text.replace(secret, BLOT)
            record.msg, record.args = text, ()
        return True


_blotter: Final = _Blotter()
_WORDY: Final = (
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
    """One client of aiobotocore, opened and closed, and the queues' addresses."""

    def __init__(self, settings: SqsConnection) -> None:
        self.settings = settings
        self._stack = AsyncExitStack()
        self._client: Any = None
        self._urls: dict[str, str] = {}

    @property
    def is_open(self) -> bool:
        return self._client is not None

    async def open(self) -> None:
        settings = self.settings
        _blotter.secrets.update(settings.secrets())
        for library in ("botocore", "aiobotocore"):
            for name in _WORDY:
                logging.getLogger(f"{library}.{name}").addFilter(_blotter)
        config = AioConfig(
            connect_timeout=settings.timeout_s,
            read_timeout=settings.wait_time_s + settings.timeout_s,
            max_pool_connections=settings.receives + 16,
            # Whoever calls knows better how often, and says so in its log.
            retries={"total_max_attempts": 1},
        )
        try:
            self._client = await self._stack.enter_async_context(
                _session().create_client(
                    "sqs",
                    region_name=settings.region,
                    endpoint_url=settings.endpoint_url,
                    aws_access_key_id=_open(settings.access_key),
                    aws_secret_access_key=_open(settings.secret_key),
                    aws_session_token=_open(settings.session_token),
                    verify=settings.ca_file or settings.verify,
                    config=config,
                )
            )
        except (*TROUBLES, ValueError) as exc:
            raise self.translated(exc) from None

    async def close(self) -> None:
        self._client = None
        await self._stack.aclose()

    async def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """One request; `BrokerUnavailable` or `BrokerRefused` says what went wrong."""
        if self._client is None:
            raise BrokerUnavailable("not connected: call connect() first")
        try:
            answer: dict[str, Any] = await getattr(self._client, operation)(**arguments)
        except Exception as exc:  # noqa: BLE001 - a task that ended by it would look like a quiet queue
            # Not chained: what botocore says may hold the request with all its headers.
            raise self.translated(exc) from None
        return answer

    async def url_of(self, queue: str, *, declare: bool = False) -> str:
        """The queue's address; a queue that is not there is refused, or made."""
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

    def translated(self, exc: BaseException) -> BrokerUnavailable:
        """The port's error for one of botocore's, with nothing secret in it."""
        where = f"SQS at {self.settings.address}"
        if isinstance(exc, ClientError):
            said = exc.response.get("Error", {})
            status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = str(said.get("Code", ""))
            text = f"{where}: {code}: {self._blotted(str(said.get('Message', '')))}"
            later = status >= 500 or status == 429 or any(word in code for word in _LATER)
            return BrokerUnavailable(text) if later else BrokerRefused(text)
        text = f"{where}: {self._blotted(str(exc)) or type(exc).__name__}"
        refused = (NoCredentialsError, PartialCredentialsError, SSLError, ValueError)
        return BrokerRefused(text) if isinstance(exc, refused) else BrokerUnavailable(text)

    def _blotted(self, text: str) -> str:
        for secret in self.settings.secrets():
            text = text.replace(secret, BLOT)
        return redact(text)


@cache
def _session() -> Any:
    """One for the process: it keeps the descriptions of AWS's services, which are long to read."""
    return get_session()


def is_fifo(queue: str) -> bool:
    return queue.endswith(_FIFO)


def dlq_of(queue: str) -> str:
    """`orders-dlq` for `orders`, `orders-dlq.fifo` for `orders.fifo`: SQS allows no other dot in a name."""
    stem = queue.removesuffix(_FIFO)
    return f"{stem}-dlq{queue[len(stem) :]}"


def _open(secret: SecretStr | None) -> str | None:
    return secret.get_secret_value() if secret is not None else None
