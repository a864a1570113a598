"""All settings in one frozen object; the only module that reads the environment.

Sources, strongest first: arguments, `HOLDFAST_*` variables and the files that `HOLDFAST_…_FILE` names, `holdfast.toml`
in the working directory. An engine in memory is isolated: it uses only those other stores, brokers and webhook
receivers that arguments name, so that a test does not reach the ones that the machine is configured for.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from holdfast.core.retry import Retry
from holdfast.core.states import ALL_EVENTS
from holdfast.core.webhook_url import ANY_SUBSCRIBER, AllowList, check_target, parse_secrets
from holdfast.engine.port.jobs import EngineOptions, RetryVia
from holdfast.environment import SECRETS, read_secret_files, warn_about_unknown
from holdfast.errors import InvalidOption
from holdfast.identity import check_worker_id
from holdfast.observe.redact import compile_rule

if TYPE_CHECKING:
    from holdfast.core.publishing import EventPublishing


#: Schemes of engines; the `s` after `redis` is TLS.
_SCHEMES = ("sqlite", "redis", "rediss", *(f"redis{s}+{kind}" for kind in ("sentinel", "cluster") for s in ("", "s")))
_LEDGER_SCHEMES = ("postgresql", "postgres", "sqlite")
_DAY_S = 86_400
_LONGEST_S = 366 * _DAY_S

#: Paths of a `sqlite:` URL that mean a temporary database.
TEMPORARY: Final = ("", "/", "/:memory:")
#: Settings that lead to other stores, brokers and webhook receivers.
OUTSIDE: Final = frozenset({"ledger", "outbox_url", "outbox_targets", "publish_events", "webhook_secret", "webhooks"})


class WebhookSubscription(BaseModel):
    """A webhook receiver and its events, besides the addresses that jobs name themselves."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    #: Patterns: `job.*`, `approval.requested`, `alert.*`.
    events: tuple[str, ...] = Field(min_length=1)
    #: `*` is every tenant.
    tenants: tuple[str, ...] = ("*",)
    #: Unset: `webhook_secret`.
    secret: SecretStr | None = None

    @field_validator("events")
    @classmethod
    def _known_events(cls, events: tuple[str, ...]) -> tuple[str, ...]:
        for event in events:
            if event.partition(".")[0] not in ("job", "approval", "alert"):
                raise ValueError(f"{event!r} is not one of job.*, approval.*, alert.*")
        return events


class OutboxTarget(BaseModel):
    """A broker that outbox events are published to. The keys of `connection` depend on the broker."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: str = Field(min_length=1)
    #: May contain a password.
    connection: dict[str, Any] = Field(default_factory=dict, repr=False)


class Settings(BaseSettings):
    """holdfast's settings. Names of durations end in their unit."""

    model_config = SettingsConfigDict(
        env_prefix="HOLDFAST_", toml_file="holdfast.toml", frozen=True, extra="forbid", env_nested_delimiter="__"
    )

    url: str = "sqlite:///holdfast.db"
    #: Unset: the engine's own file on SQLite, no ledger on Redis.
    ledger: str | None = None
    #: Token of the principal that uses this command line.
    token: SecretStr | None = None

    namespace: str = Field("", pattern=r"^[A-Za-z0-9_.-]*$")
    stream_task: str = Field("stream:task", min_length=1)
    stream_result: str = Field("stream:result", min_length=1)
    #: Empty disables the stream; the states remain.
    stream_dlq: str = "stream:dlq"
    group: str = Field("cg:workers", min_length=1)
    queue_retry: str = Field("queue:retry", min_length=1)
    queue_suspended: str = Field("queue:suspended", min_length=1)

    visibility_timeout_s: float = Field(30, gt=0)
    heartbeat_interval_s: float = Field(10, gt=0)
    max_deliveries: int = Field(5, ge=1)
    #: Whether this process lets leases of workers that were killed on the same host expire at once.
    dead_worker_detection: bool = True
    reclaim: bool = True
    reclaim_interval_s: float = Field(1, ge=0)
    reclaim_batch: int = Field(100, ge=1, le=500)
    #: With `retry_via` pending: shortest time that a retry stays in the pending list.
    reclaim_idle_s: float = Field(0, ge=0)
    #: Queue name → where its retries wait: "schedule" or "pending".
    retry_via: dict[str, RetryVia] = Field(default_factory=dict)

    payload_limit: int = Field(1024 * 1024, ge=1)
    finished_ttl_s: float = Field(3_600, gt=0)
    idempotency_window_s: float = Field(86_400, gt=0)
    result_limit: int = Field(10_000, ge=1)
    result_ttl_s: float = Field(86_400, gt=0)
    #: Queues of one tenant: those that it was the first to submit to. The next new one is refused.
    tenant_queue_limit: int = Field(1_000, ge=1)
    feed_limit: int = Field(1_000, ge=1)
    feed_max_bytes: int = Field(512 * 1024 * 1024, ge=1)

    #: How long the ledger keeps finished jobs; in embedded mode, how long they stay in the engine's file.
    retention_days: float = Field(30, gt=0)
    #: PostgreSQL connections per process for writing; queries may briefly open the same number again.
    ledger_pool_size: int = Field(5, ge=1)
    #: Whether workers write the feed into the ledger; if not, `holdfast upkeep` must run.
    projector: bool = True
    #: How often to search for jobs that the engine has lost; 0 disables the search.
    reconcile_interval_s: float = Field(300, ge=0)
    #: With a ledger, jobs are not claimed after the engine was started or replaced until both have been compared. If
    #: the ledger does not answer for `unverified_epoch_wait_s`: `run` claims them all the same, `wait` waits for it.
    on_unverified_epoch: Literal["run", "wait"] = "run"
    unverified_epoch_wait_s: float = Field(60, ge=0)
    #: How long a durable submission waits for the ledger.
    durable_timeout_s: float = Field(10, gt=0)
    #: How long a job is offered to other workers if its task, or the task with its schema, is unknown to a worker.
    #: After that it is a dead letter. 0: at once.
    unknown_task_grace_s: float = Field(600, ge=0, le=_LONGEST_S)
    #: How long a guard may take to answer; after that the job is not accepted and does not run.
    guard_timeout_s: float = Field(10, gt=0)

    #: Retries of tasks without their own policy. Retry n waits base · multiplier^(n−1), at most the cap, plus a random
    #: part of the jitter.
    max_retries: int = Field(3, ge=0)
    retry_base_s: float = Field(1, ge=0, le=_LONGEST_S)
    retry_multiplier: float = Field(2, ge=1, allow_inf_nan=False)
    #: Unset: 30, or `retry_base_s` if that is longer.
    retry_cap_s: float | None = Field(None, ge=0, le=_LONGEST_S)
    retry_jitter_s: float = Field(0.3, ge=0, le=_LONGEST_S)

    #: Stable identity of `holdfast worker`: one that starts again with it takes over its leases at once. Unset: none.
    worker_id: str | None = None
    concurrency: int = Field(100, ge=1)
    drain_grace_s: float = Field(30, ge=0)

    #: Key that signs webhooks: `whsec_…`, several separated by spaces. Without one no webhooks are sent.
    webhook_secret: SecretStr | None = None
    #: Networks and host names that webhooks may be sent to, besides the public internet.
    webhook_allow: tuple[str, ...] = ()
    #: Receivers of notifications about ended jobs, approvals and alerts.
    webhooks: tuple[WebhookSubscription, ...] = ()
    webhook_timeout_s: float = Field(15, gt=0, le=300)
    webhook_attempts: int = Field(8, ge=1)
    #: Wait before the second attempt; quadruples before each further one, up to an hour.
    webhook_backoff_s: float = Field(5, ge=0)

    #: Database whose `outbox_events` the relay reads; unset: the ledger.
    outbox_url: str | None = None
    #: Brokers by the destination name in events: `{"default": {"type": "kafka", "connection": {…}}}`.
    outbox_targets: dict[str, OutboxTarget] = Field(default_factory=dict)
    #: Whether workers run a relay; `holdfast outbox relay`, `upkeep` and `dev` always do.
    outbox_relay: bool = False
    #: `plain` publishes the payload unchanged.
    outbox_envelope: Literal["cloudevents", "plain"] = "cloudevents"
    #: CloudEvents' `source`; empty: `holdfast/<namespace>`.
    outbox_source: str = ""
    #: Attempts to publish an event before it is DEAD.
    outbox_max_attempts: int = Field(10, ge=1)
    #: Wait before the second attempt; doubles before each further one, up to the maximum.
    outbox_backoff_base_s: float = Field(1, ge=0)
    outbox_backoff_max_s: float = Field(600, ge=0)
    outbox_batch: int = Field(500, ge=1, le=500)
    #: Whether a DEAD event blocks later events of its key until an operator revives it.
    outbox_dead_blocks: bool = True
    #: How long a crashed relay keeps its lanes from others; a publication must finish within half of it.
    outbox_lease_s: float = Field(30, ge=1)
    #: How long SENT events are kept.
    outbox_retention_s: float = Field(_DAY_S, gt=0)
    #: Name in `outbox_targets` of the broker that job events are published to; unset: they are not published.
    publish_events: str | None = None
    publish_events_topic: str = Field("holdfast.job-events", min_length=1, max_length=255)
    #: Event types to publish, for example `task.succeeded`; empty: all but heartbeats.
    publish_event_types: tuple[str, ...] = ()

    #: Prefix of metric names.
    metrics_prefix: str = Field("holdfast", pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$")
    #: Backlog of a queue that raises an alert, unless an operator has set another number for the queue.
    backlog_alert: int | None = Field(None, ge=1)
    #: OpenTelemetry spans: on, off, or (unset) on if the program has set a tracer provider.
    tracing: bool | None = None
    #: Further secrets to redact from logs, failures and events: names of values, or regular expressions.
    redact: tuple[str, ...] = ()

    #: Largest request body of the HTTP service, in bytes; `payload_limit` applies to a job's arguments.
    http_body_limit: int = Field(8 * 1024 * 1024, ge=1_024)
    #: Longest wait of a request with `?wait=`.
    http_wait_limit_s: float = Field(60, ge=0, le=600)
    #: Whether the web process also runs a worker, and upkeep (requirement H4).
    http_worker: bool = False
    http_upkeep: bool = True
    #: Queues that metrics name; the others are added up as `other`.
    metrics_queue_limit: int = Field(200, ge=0)
    #: Whether `/metrics` is served without a token.
    metrics_open: bool = False
    #: Whether `POST /api/v1/internal/jobs/{job_id}/run` is served (requirement H3).
    run_endpoint: bool = False
    #: Entries kept in a feed behind its reader, for event streams that lag a little.
    feed_tail: int = Field(200, ge=0)

    connect_timeout_s: float = Field(5, gt=0)
    #: Time after which a store that accepts connections but does not answer counts as unreachable.
    reply_timeout_s: float = Field(10, gt=0)

    @classmethod
    def load(cls, **overrides: Any) -> Settings:
        """Settings from all sources; arguments that are None are ignored. Raises `InvalidOption`."""
        return cls.exactly({name: value for name, value in overrides.items() if value is not None})

    @classmethod
    def exactly(cls, given: Mapping[str, Any]) -> Settings:
        """As `load`, except that an argument that is None unsets the setting."""
        warn_about_unknown(os.environ, cls.model_fields)
        try:
            return cls(**given)
        except ValidationError as exc:
            raise InvalidOption("settings: " + "; ".join(map(_format_error, exc.errors()))) from exc

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file, arguments = TomlConfigSettingsSource(settings_cls), init_settings()
        variables = env_settings() | read_secret_files(os.environ, {"url"} - arguments.keys())
        url = next((found["url"] for found in (arguments, variables, file()) if "url" in found), None)
        ignored = OUTSIDE if isinstance(url, str) and is_in_memory(url) else frozenset[str]()
        variables |= read_secret_files(os.environ, SECRETS - {"url"} - ignored - arguments.keys())
        file.init_kwargs = _drop(ignored, file.init_kwargs)
        return init_settings, InitSettingsSource(settings_cls, _drop(ignored, variables)), file

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, url: str) -> str:
        scheme, separator, _ = url.partition("://")
        if not separator or scheme not in _SCHEMES:
            raise ValueError(f"must begin with one of {', '.join(s + '://' for s in _SCHEMES)}")
        return url

    @field_validator("ledger", "outbox_url")
    @classmethod
    def _known_ledger(cls, ledger: str | None) -> str | None:
        # A shell passes an unset variable as an empty string.
        if not ledger:
            return None
        scheme, separator, _ = ledger.partition("://")
        if not separator or scheme not in _LEDGER_SCHEMES:
            raise ValueError("must begin with postgresql:// or sqlite:///")
        return ledger

    @field_validator("worker_id")
    @classmethod
    def _usable_worker_id(cls, worker_id: str | None) -> str | None:
        # A shell passes an unset variable as an empty string.
        try:
            return check_worker_id(worker_id) if worker_id else None
        except InvalidOption as exc:
            raise ValueError(str(exc)) from exc

    @field_validator("outbox_targets")
    @classmethod
    def _require_broker_names(cls, targets: dict[str, OutboxTarget]) -> dict[str, OutboxTarget]:
        if "holdfast" in targets:
            raise ValueError("holdfast is the engine itself (transactional enqueue); give the broker another name")
        return targets

    @field_validator("redact")
    @classmethod
    def _require_specific_rules(cls, redact: tuple[str, ...]) -> tuple[str, ...]:
        for rule in redact:
            if not rule or compile_rule(rule).match(""):
                raise ValueError(f"{rule!r} matches every text; use a narrower rule")
        return redact

    @field_validator("token")
    @classmethod
    def _drop_empty_token(cls, token: SecretStr | None) -> SecretStr | None:
        # A shell passes an unset variable as an empty string.
        return token if token is not None and token.get_secret_value() else None

    @model_validator(mode="after")
    def _webhooks_can_be_sent(self) -> Self:
        exceptions = self.webhook_allow_list
        parse_secrets(_secret_text(self.webhook_secret))
        for subscription in self.webhooks:
            if subscription.url == ANY_SUBSCRIBER:
                raise ValueError("webhooks: an address must begin with https:// or http://")
            check_target(subscription.url, exceptions)
            if not self.webhook_secrets(subscription.url):
                raise ValueError("webhooks (HOLDFAST_WEBHOOKS) need their own secret, or webhook_secret")
        return self

    @model_validator(mode="after")
    def _retention_exceeds_the_window(self) -> Self:
        if self.retention_days * _DAY_S < self.idempotency_window_s:
            raise ValueError(
                "retention_days (HOLDFAST_RETENTION_DAYS) must not be shorter than idempotency_window_s "
                "(HOLDFAST_IDEMPOTENCY_WINDOW_S): after a wipe the keys are restored from the ledger"
            )
        return self

    @field_validator("publish_event_types")
    @classmethod
    def _known_event_types(cls, types: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := sorted(set(types) - ALL_EVENTS):
            raise ValueError(f"unknown event types: {', '.join(unknown)}; known: {', '.join(sorted(ALL_EVENTS))}")
        return types

    @model_validator(mode="after")
    def _events_can_be_published(self) -> Self:
        if not self.publish_events:
            return self
        if self.publish_events == "holdfast":
            raise ValueError("publish_events (HOLDFAST_PUBLISH_EVENTS): holdfast is the engine itself; name a broker")
        if self.outbox_url is not None:
            raise ValueError(
                "publish_events (HOLDFAST_PUBLISH_EVENTS) writes into the ledger's outbox, which a relay with "
                "outbox_url (HOLDFAST_OUTBOX_URL) does not read; unset one of them"
            )
        if self.ledger is None and not self.embedded:
            raise ValueError("publish_events (HOLDFAST_PUBLISH_EVENTS) needs a ledger: set ledger (HOLDFAST_LEDGER)")
        return self

    @model_validator(mode="after")
    def _heartbeat_within_lease(self) -> Self:
        if self.heartbeat_interval_s * 2 > self.visibility_timeout_s:
            raise ValueError(
                "heartbeat_interval_s (HOLDFAST_HEARTBEAT_INTERVAL_S) must be at most half of visibility_timeout_s "
                "(HOLDFAST_VISIBILITY_TIMEOUT_S), otherwise leases expire"
            )
        return self

    @property
    def webhooks_enabled(self) -> bool:
        """Whether webhooks can be sent: there is a subscription or a secret."""
        return bool(self.webhooks) or bool(_secret_text(self.webhook_secret))

    @property
    def opens_unverified_after_s(self) -> float | None:
        """How long claims wait for the ledger in a new epoch of the engine; None: until it answers."""
        return self.unverified_epoch_wait_s if self.on_unverified_epoch == "run" else None

    @property
    def delivers(self) -> bool:
        """Whether upkeep sends webhooks: they are enabled, and there is a ledger to send them from."""
        return self.webhooks_enabled and (self.embedded or self.ledger is not None)

    @property
    def webhook_allow_list(self) -> AllowList:
        """Where webhooks may be sent, besides the public internet."""
        return AllowList.parse(self.webhook_allow)

    def webhook_secrets(self, url: str) -> tuple[bytes, ...]:
        """Keys that sign deliveries to this address: the subscription's own secret, otherwise the common one."""
        own = next((each.secret for each in self.webhooks if each.url == url and each.secret is not None), None)
        return parse_secrets(_secret_text(own or self.webhook_secret))

    @property
    def on_cluster(self) -> bool:
        """Whether the engine is a Redis Cluster, where all keys of a queue have a hash tag."""
        return self.url.partition("://")[0].endswith("+cluster")

    @property
    def in_memory(self) -> bool:
        """Whether the engine is a temporary database of this app alone."""
        return is_in_memory(self.url)

    @property
    def isolated(self) -> bool:
        """Whether the engine is in memory and no other store is configured."""
        return self.in_memory and self.embedded and self.outbox_url is None

    @property
    def embedded(self) -> bool:
        """Whether the engine's file is the ledger."""
        if not self.url.startswith("sqlite:"):
            return False
        return self.ledger is None or _same_file(self.url, self.ledger)

    @property
    def publishing(self) -> EventPublishing | None:
        """Which job events are published, and where to; None if none are."""
        if not self.publish_events:
            return None
        from holdfast.core.publishing import EventPublishing

        return EventPublishing(self.publish_events, self.publish_events_topic, frozenset(self.publish_event_types))

    @property
    def _finished_ttl_s(self) -> float:
        chosen = "finished_ttl_s" in self.model_fields_set and "retention_days" not in self.model_fields_set
        return self.finished_ttl_s if not self.embedded or chosen else self.retention_days * _DAY_S

    @property
    def retry(self) -> Retry:
        """The retry policy of tasks without their own."""
        return Retry(
            self.max_retries,
            base=self.retry_base_s,
            multiplier=self.retry_multiplier,
            cap=self.retry_cap_s,
            jitter=self.retry_jitter_s,
        )

    def engine_options(self) -> EngineOptions:
        """The options of an engine."""
        return EngineOptions(
            visibility_timeout_ms=max(1, round(self.visibility_timeout_s * 1000)),
            settle_ms=round(self.heartbeat_interval_s * 1000),
            payload_limit=self.payload_limit,
            max_deliveries=self.max_deliveries,
            finished_ttl_ms=max(1, round(self._finished_ttl_s * 1000)),
            idempotency_window_ms=max(1, round(self.idempotency_window_s * 1000)),
            ledger=self.ledger is not None and not self.embedded,
            retry_via=self.retry_via,
            pending_idle_ms=round(self.reclaim_idle_s * 1000),
            result_limit=self.result_limit,
            result_ttl_ms=max(1, round(self.result_ttl_s * 1000)),
            dlq_ttl_ms=max(1, round(self.retention_days * _DAY_S * 1000)),
            tenant_queue_limit=self.tenant_queue_limit,
            feed_limit=self.feed_limit,
            feed_tail=self.feed_tail,
            feed_max_bytes=self.feed_max_bytes,
            publishing=self.publishing if self.embedded else None,
        )


def _drop(names: Collection[str], found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in names}


def is_in_memory(url: str) -> bool:
    """Whether an engine's URL means a temporary database."""
    parts = urlsplit(url)
    return parts.scheme == "sqlite" and not parts.netloc and unquote(parts.path) in TEMPORARY


def _format_error(error: ErrorDetails) -> str:
    """Format an error with the setting's name and its variable."""
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        # An error about several settings, which the message names.
        return message
    name = str(error["loc"][0])
    if error["type"] == "extra_forbidden" and len(error["loc"]) == 1:
        nearest = get_close_matches(name.lower(), Settings.model_fields, 1)
        return f"{name}: unknown setting" + (f"; did you mean {nearest[0]}?" if nearest else "")
    path = ".".join(map(str, error["loc"]))
    return f"{path} (HOLDFAST_{name.upper()}): {message}" if name in Settings.model_fields else f"{path}: {message}"


def _secret_text(secret: SecretStr | None) -> str:
    return "" if secret is None else secret.get_secret_value()


def _same_file(url: str, other: str) -> bool:
    one, two = urlsplit(url), urlsplit(other)
    if one.scheme != two.scheme:
        return False
    return Path(unquote(one.path[1:])).resolve() == Path(unquote(two.path[1:])).resolve()
