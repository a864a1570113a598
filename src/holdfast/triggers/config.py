"""Configuration of triggers (T3) and capacity planning (T9).

Configurations are frozen and validated when they are created. `QueueTriggerConfig` has the options of a `QueueTrigger`;
`TriggerEntry` adds the sections for adapter and runtime, as in a file (`holdfast.triggers.config_file`).

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

#: Like names of queues and tasks, but without a slash, because it is part of URLs.
_NAME: Final = re.compile(r"[!-.0-z|~]{1,200}")
#: Header names are compared in lower case.
_HEADER: Final = re.compile(r"[\x21-\x7e]{1,200}")
#: `package.module:function`, or a path to a file.
_CALLABLE: Final = re.compile(r"[^:]+:[A-Za-z_]\w*")
_MIN_PREFETCH: Final = 10


class AckPolicy(StrEnum):
    """What to do with a message that failed permanently; of a denied one only `dlq` matters."""

    ACK = "ack"
    #: Let the broker drop it.
    NACK = "nack"
    REQUEUE = "requeue"
    DLQ = "dlq"


class ParserType(StrEnum):
    JSON = "json"
    TEXT = "text"
    BINARY = "binary"
    #: CloudEvents 1.0 in structured JSON, as written by the outbox.
    CLOUDEVENTS = "cloudevents"


class DedupDown(StrEnum):
    """What to do while the store of dedup keys is unreachable."""

    HOLD = "hold"
    #: Continue without dedup and warn: a duplicate may run.
    WARN = "warn"


class _Model(BaseModel):
    # Inputs may be credentials, so errors do not quote them.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)


class MetricsConfig(_Model):
    """Metrics of a trigger, and how often the lag is read from the broker."""

    enabled: bool = True
    #: Seconds between two reads of the lag.
    export_interval: float = Field(15, gt=0)


class AdapterConfig(_Model):
    """Broker type and connection. The fields of `connection` depend on the type."""

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
    def _matches_type(cls, value: Any, info: ValidationInfo) -> BaseModel:
        # Without a valid type the connection cannot be checked; the error of `type` is reported.
        if "type" not in info.data:
            return _Model()
        return connection_model(info.data["type"]).model_validate({} if value is None else value)


class RuntimeConfig(_Model):
    """What handles messages: exactly one of `task`, `callable` and `url`."""

    #: Name of a holdfast task; each message becomes a job.
    task: str | None = Field(None, min_length=1)
    #: `module:function` or `file.py:function`.
    callable: str | None = None
    #: Agent runtime over HTTP.
    url: str | None = None
    #: Timeout of one call of `url`, in seconds.
    timeout: float = Field(30, gt=0)
    #: Sent to `url` as a bearer token.
    token: SecretStr | None = None

    @field_validator("callable")
    @classmethod
    def _is_a_callable(cls, reference: str | None) -> str | None:
        if reference is not None and not _CALLABLE.fullmatch(reference):
            raise ValueError("must be module:function or file.py:function")
        return reference

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must start with http:// or https://")
        if "@" in parts.netloc:
            raise ValueError("must not contain credentials; use token")
        return url

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in ("task", "callable", "url") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"set exactly one of task, callable and url, not {' and '.join(given) or 'none'}")
        if self.url is None and self.model_fields_set & {"timeout", "token"}:
            raise ValueError("timeout and token require url")
        return self

    @property
    def kind(self) -> str:
        """`task`, `callable` or `url`."""
        return "task" if self.task else "callable" if self.callable else "url"


class QueueTriggerConfig(_Model):
    """Options of one trigger."""

    queue_name: str = Field(min_length=1, max_length=500)
    consumer_group: str = Field(min_length=1, max_length=500)
    #: Name of the trigger. Default: `queue_name`.
    name: str = Field("", validate_default=True)
    #: Messages handled at the same time.
    concurrency: int = Field(1, ge=1, le=10_000)
    ack_policy: AckPolicy = AckPolicy.ACK
    #: Attempts after the first one.
    max_retries: int = Field(3, ge=0)
    #: Seconds before the first retry, multiplied for each further one.
    retry_backoff_base: float = Field(1.0, gt=0)
    retry_backoff_multiplier: float = Field(2.0, ge=1)
    enable_dedup: bool = True
    #: Seconds for which a dedup key is known.
    idempotency_window: float = Field(3600, gt=0)
    dedup_down: DedupDown = DedupDown.HOLD
    parser_type: ParserType = ParserType.JSON
    event_name_header: str = "x-event-name"
    dedup_header: str = "x-dedup-key"
    tenant_header: str = "x-tenant-id"
    #: Allowed tenants; the first one is the default for messages without a tenant. None: any.
    tenants: tuple[str, ...] | None = Field(None, min_length=1)
    #: Passed to the runtime unchanged.
    focus: str | None = None
    #: Dead-letter queue. Default: `<queue_name>.dlq`, or the closest name that the broker allows.
    dlq_name: str | None = Field(None, min_length=1, max_length=500)
    #: Maximum number of messages in flight. Default: twice the concurrency, at least ten.
    prefetch: int = Field(0, ge=0, le=100_000, validate_default=True)
    metrics: MetricsConfig = MetricsConfig()

    @field_validator("event_name_header", "dedup_header", "tenant_header")
    @classmethod
    def _is_a_header(cls, name: str) -> str:
        if not _HEADER.fullmatch(name):
            raise ValueError("must be a header name: ASCII without spaces")
        return name.lower()

    @field_validator("tenants")
    @classmethod
    def _are_tenants(cls, tenants: tuple[str, ...] | None) -> tuple[str, ...] | None:
        try:
            return tenants and tuple(check_name(tenant, "tenant") for tenant in tenants)
        except InvalidOption as exc:
            raise ValueError(str(exc)) from None

    # Missing fields are derived from those above them, in validators, so that all errors are reported together.

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str, info: ValidationInfo) -> str:
        name = name or info.data.get("queue_name", "unnamed")
        if not _NAME.fullmatch(name):
            raise ValueError("must be a name: up to 200 ASCII characters without spaces, slashes and braces")
        return name

    @field_validator("dlq_name")
    @classmethod
    def _is_another_queue(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is not None and name == info.data.get("queue_name"):
            raise ValueError("must differ from queue_name")
        return name

    @field_validator("prefetch")
    @classmethod
    def _is_enough(cls, prefetch: int, info: ValidationInfo) -> int:
        concurrency = info.data.get("concurrency", 1)
        prefetch = prefetch or max(2 * concurrency, _MIN_PREFETCH)
        if prefetch < concurrency:
            raise ValueError(f"must be at least concurrency ({concurrency})")
        return prefetch

    @property
    def idempotency_window_ms(self) -> int:
        return max(1, round(self.idempotency_window * 1000))


class TriggerEntry(QueueTriggerConfig):
    """A trigger in a configuration file: options, adapter and runtime."""

    adapter: AdapterConfig
    runtime: RuntimeConfig


#: More CPU-bound workers per core do not increase throughput.
_PER_CORE: Final = 2
_MIB: Final = 2**20
#: Memory of the interpreter and of dedup keys, in MB.
_BASE_MB: Final = 100
_KEYS_MB: Final = 50
#: Messages buffered per worker.
_BUFFERED: Final = 100
_RESERVE: Final = 1.5
#: Upper bound of inputs: beyond any machine, and still exact in floating point.
_MAX_INPUT: Final = 1e12


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Required workers, memory and processes."""

    concurrency: int
    #: Workers that the rate needs; more than `concurrency` if the cores are the limit.
    required: int
    memory_mb: float
    #: Messages per second at this `concurrency`.
    rate: float

    @property
    def enough(self) -> bool:
        """Whether one process is enough."""
        return self.concurrency >= self.required

    @property
    def processes(self) -> int:
        """Number of processes of this size needed, each on its own machine."""
        return math.ceil(self.required / self.concurrency)


def plan_capacity(
    *, rate: float, seconds_per_message: float, message_bytes: float, cores: int, waiting: bool = False
) -> CapacityPlan:
    """Plan for `rate` messages per second. `waiting`: the work is I/O-bound and does not occupy a core."""
    for name, value in (("rate", rate), ("seconds per message", seconds_per_message), ("cores", cores)):
        if not 0 < value <= _MAX_INPUT:
            raise InvalidOption(f"{name} must be greater than 0, not {value}")
    if not 0 <= message_bytes <= _MAX_INPUT:
        raise InvalidOption(f"bytes per message must be 0 or more, not {message_bytes}")
    # 0.1 × 30 is slightly more than 3 in floating point and would need a fourth worker.
    required = max(1, math.ceil(round(rate * seconds_per_message, 9)))
    concurrency = required if waiting else min(required, _PER_CORE * cores)
    memory_mb = (_BASE_MB + concurrency * _BUFFERED * message_bytes / _MIB + _KEYS_MB) * _RESERVE
    return CapacityPlan(
        concurrency=concurrency, required=required, memory_mb=memory_mb, rate=concurrency / seconds_per_message
    )
