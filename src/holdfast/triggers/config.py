"""Configuration of triggers (T3) and capacity planning (T9).

Configurations are frozen and validated when they are created. `TriggerConfig` says how a trigger behaves; with an
adapter and a runtime it is all that `QueueTrigger` needs. `TriggerEntry` adds the description of both, as in a file
(`holdfast.triggers.config_file`).

`plan_capacity` estimates the workers and memory that a trigger needs. It calculates and does not measure.
"""

from __future__ import annotations

import math
import re
from enum import StrEnum
from typing import Any, Final, Self
from urllib.parse import urlsplit

import msgspec
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    SerializeAsAny,
    ValidationInfo,
    field_validator,
    model_validator,
)

from holdfast.brokers.factory import connection_model
from holdfast.core.text import check_name
from holdfast.errors import InvalidOption

#: As names of queues and tasks are, and without a slash: it stands in addresses.
_NAME: Final = re.compile(r"[!-.0-z|~]{1,200}")
#: Header names are compared in lower case.
_HEADER: Final = re.compile(r"[\x21-\x7e]{1,200}")
#: `package.module:function`, or a path to a file.
_CALLABLE: Final = re.compile(r"[^:]+:[A-Za-z_]\w*")
_LEAST_PREFETCH: Final = 10


class AckPolicy(StrEnum):
    """What becomes of a message that was denied, or whose hand-over failed for good."""

    ACK = "ack"
    #: The broker's own way of dropping it.
    NACK = "nack"
    REQUEUE = "requeue"
    DLQ = "dlq"


class ParserType(StrEnum):
    JSON = "json"
    TEXT = "text"
    BINARY = "binary"
    #: CloudEvents 1.0 in structured JSON, as the outbox writes them.
    CLOUDEVENTS = "cloudevents"


class DedupDown(StrEnum):
    """What to do while the store of keys does not answer."""

    HOLD = "hold"
    #: Go on without, and warn: a duplicate may run.
    WARN = "warn"


class _Model(BaseModel):
    # Inputs may be credentials: no error shows them.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)


class MetricsConfig(_Model):
    """Whether a trigger's messages are counted, and how often the broker is asked how many wait."""

    enabled: bool = True
    #: Seconds between two questions.
    export_interval: float = Field(15, gt=0)


class AdapterConfig(_Model):
    """The broker, and how to reach it; the fields of `connection` are the broker's."""

    type: str
    connection: SerializeAsAny[BaseModel] = Field(default_factory=dict, validate_default=True)

    @field_validator("type")
    @classmethod
    def _is_known(cls, name: str) -> str:
        try:
            connection_model(name)
        except InvalidOption as exc:
            raise ValueError(str(exc)) from None
        return name

    @field_validator("connection", mode="before")
    @classmethod
    def _of_its_type(cls, value: Any, info: ValidationInfo) -> BaseModel:
        # Without a type nothing can be said of the connection; the type's own mistake is told.
        if "type" not in info.data:
            return _Model()
        return connection_model(info.data["type"]).model_validate({} if value is None else value)


class RuntimeConfig(_Model):
    """Who acts on messages: exactly one of a task, a callable and an address."""

    #: A holdfast task, by its name; messages become its jobs.
    task: str | None = Field(None, min_length=1)
    #: `module:function` or `file.py:function`.
    callable: str | None = None
    #: An agent's runtime over HTTP.
    url: str | None = None
    #: Seconds for one call of `url`.
    timeout: float = Field(30, gt=0)
    #: Sent to `url` as a bearer token.
    token: SecretStr | None = None

    @field_validator("callable")
    @classmethod
    def _is_a_place(cls, place: str | None) -> str | None:
        if place is not None and not _CALLABLE.fullmatch(place):
            raise ValueError("write module:function or file.py:function")
        return place

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("write an address that begins with http:// or https://")
        if "@" in parts.netloc:
            raise ValueError("an address with credentials in it ends up in logs; use token")
        return url

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in ("task", "callable", "url") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of task, callable and url is wanted, not {' and '.join(given) or 'none'}")
        if self.url is None and self.model_fields_set & {"timeout", "token"}:
            raise ValueError("timeout and token belong to url")
        return self

    @property
    def kind(self) -> str:
        """`task`, `callable` or `url`."""
        return "task" if self.task else "callable" if self.callable else "url"


class TriggerConfig(_Model):
    """How one trigger behaves."""

    queue_name: str = Field(min_length=1, max_length=500)
    consumer_group: str = Field(min_length=1, max_length=500)
    #: Of the trigger, for people; the queue's unless told.
    name: str = Field("", validate_default=True)
    #: Messages in hand at the same time.
    concurrency: int = Field(1, ge=1, le=10_000)
    ack_policy: AckPolicy = AckPolicy.ACK
    #: Tries of a hand-over after the first one.
    max_retries: int = Field(3, ge=0)
    #: Seconds before the first retry; then times the multiplier, each time.
    retry_backoff_base: float = Field(1.0, gt=0)
    retry_backoff_multiplier: float = Field(2.0, ge=1)
    enable_dedup: bool = True
    #: Seconds for which a key is known.
    idempotency_window: float = Field(3600, gt=0)
    dedup_down: DedupDown = DedupDown.HOLD
    parser_type: ParserType = ParserType.JSON
    event_name_header: str = "x-event-name"
    dedup_header: str = "x-dedup-key"
    tenant_header: str = "x-tenant-id"
    #: The only tenants that messages may be for; the first is that of messages that name none. None: any.
    tenants: tuple[str, ...] | None = Field(None, min_length=1)
    #: Handed to the runtime as it is.
    focus: str | None = None
    #: Where dead letters go; `<queue_name>.dlq` unless told, or the nearest to it that the broker allows.
    dlq_name: str | None = Field(None, min_length=1, max_length=500)
    #: Messages out of the broker's hands at the same time; twice the concurrency, at least ten, unless told.
    prefetch: int = Field(0, ge=0, le=100_000, validate_default=True)
    metrics: MetricsConfig = MetricsConfig()

    @field_validator("event_name_header", "dedup_header", "tenant_header")
    @classmethod
    def _is_a_header(cls, name: str) -> str:
        if not _HEADER.fullmatch(name):
            raise ValueError("write a header's name: ASCII without spaces")
        return name.lower()

    @field_validator("tenants")
    @classmethod
    def _are_tenants(cls, tenants: tuple[str, ...] | None) -> tuple[str, ...] | None:
        try:
            return tenants and tuple(check_name(tenant, "tenant") for tenant in tenants)
        except InvalidOption as exc:
            raise ValueError(str(exc)) from None

    # Fields that are left out are derived from those above them; each mistake is told with all the others.

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str, info: ValidationInfo) -> str:
        name = name or info.data.get("queue_name", "unnamed")
        if not _NAME.fullmatch(name):
            raise ValueError("give it a name: up to 200 characters of ASCII without spaces, slashes and braces")
        return name

    @field_validator("dlq_name")
    @classmethod
    def _is_another_queue(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is not None and name == info.data.get("queue_name"):
            raise ValueError("dead letters need a queue of their own")
        return name

    @field_validator("prefetch")
    @classmethod
    def _is_enough(cls, prefetch: int, info: ValidationInfo) -> int:
        concurrency = info.data.get("concurrency", 1)
        prefetch = prefetch or max(2 * concurrency, _LEAST_PREFETCH)
        if prefetch < concurrency:
            raise ValueError(f"must be at least concurrency ({concurrency}), else workers are idle")
        return prefetch

    @property
    def idempotency_window_ms(self) -> int:
        return max(1, round(self.idempotency_window * 1000))


class TriggerEntry(TriggerConfig):
    """A trigger as it stands in a file: how it behaves, where messages come from, who acts on them."""

    adapter: AdapterConfig
    runtime: RuntimeConfig


#: Workers that compute gain nothing beyond so many for each core.
_PER_CORE: Final = 2
_MIB: Final = 2**20
#: The interpreter, and the keys of deduplication, in MB.
_BASE_MB: Final = 100
_KEYS_MB: Final = 50
#: Messages that lie ready for each worker.
_BUFFERED: Final = 100
_RESERVE: Final = 1.5
#: More than any machine, and few enough to be exact.
_MOST: Final = 1e12


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed, in one process or in several."""

    concurrency: int
    #: What the rate would take; more than `concurrency` if the cores are the limit.
    wanted: int
    memory_mb: float
    #: Messages per second that `concurrency` can do.
    rate: float

    @property
    def enough(self) -> bool:
        """Whether one process keeps up."""
        return self.concurrency >= self.wanted

    @property
    def processes(self) -> int:
        """Processes of this size, on machines of their own, that keep up together."""
        return math.ceil(self.wanted / self.concurrency)


def plan_capacity(
    *, rate: float, seconds_per_message: float, message_bytes: float, cores: int, waiting: bool = False
) -> CapacityPlan:
    """For `rate` messages a second; `waiting`: the work waits for others, and does not keep a core busy."""
    for name, value in (("rate", rate), ("seconds per message", seconds_per_message), ("cores", cores)):
        if not 0 < value <= _MOST:
            raise InvalidOption(f"{name} must be more than 0, not {value}")
    if not 0 <= message_bytes <= _MOST:
        raise InvalidOption(f"bytes per message must be 0 or more, not {message_bytes}")
    # 0.1 × 30 is a hair more than 3 in floating point, and would ask for a fourth.
    wanted = max(1, math.ceil(round(rate * seconds_per_message, 9)))
    concurrency = wanted if waiting else min(wanted, _PER_CORE * cores)
    memory_mb = (_BASE_MB + concurrency * _BUFFERED * message_bytes / _MIB + _KEYS_MB) * _RESERVE
    return CapacityPlan(
        concurrency=concurrency, wanted=wanted, memory_mb=memory_mb, rate=concurrency / seconds_per_message
    )
