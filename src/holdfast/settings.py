"""All settings, in one frozen place; the only reader of the environment.

Sources, strongest first: arguments, `HOLDFAST_*` variables, `holdfast.toml` in the working directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from holdfast.engine.port import EngineOptions, RetryVia
from holdfast.errors import InvalidOption

_SCHEMES = ("sqlite", "redis", "rediss")
#: Accepted here, so that the engine can say that they are not supported yet.
_RESERVED = ("redis+sentinel", "redis+cluster")
_LEDGER_SCHEMES = ("postgresql", "postgres", "sqlite")
_DAY_S = 86_400


class Settings(BaseSettings):
    """holdfast's settings. Durations carry their unit in the name."""

    model_config = SettingsConfigDict(
        env_prefix="HOLDFAST_", toml_file="holdfast.toml", frozen=True, extra="forbid", env_nested_delimiter="__"
    )

    url: str = "sqlite:///holdfast.db"
    #: Unset: on SQLite the engine's own file, on Redis none.
    ledger: str | None = None

    namespace: str = Field("", pattern=r"^[A-Za-z0-9_.-]*$")
    stream_task: str = Field("stream:task", min_length=1)
    stream_result: str = Field("stream:result", min_length=1)
    #: Empty turns the stream off; the state stays.
    stream_dlq: str = "stream:dlq"
    group: str = Field("cg:workers", min_length=1)
    queue_retry: str = Field("queue:retry", min_length=1)
    queue_suspended: str = Field("queue:suspended", min_length=1)

    visibility_timeout_s: float = Field(30, gt=0)
    heartbeat_interval_s: float = Field(10, gt=0)
    max_deliveries: int = Field(5, ge=1)
    reclaim: bool = True
    reclaim_interval_s: float = Field(1, ge=0)
    reclaim_batch: int = Field(100, ge=1, le=500)
    #: With `retry_via` pending: how long a retry rests in the pending list at least.
    reclaim_idle_s: float = Field(0, ge=0)
    #: Queue name → "schedule" or "pending" (where a retry waits).
    retry_via: dict[str, RetryVia] = Field(default_factory=dict)

    payload_limit: int = Field(1024 * 1024, ge=1)
    finished_ttl_s: float = Field(3_600, gt=0)
    idempotency_window_s: float = Field(86_400, gt=0)
    result_limit: int = Field(10_000, ge=1)
    result_ttl_s: float = Field(86_400, gt=0)
    feed_limit: int = Field(1_000, ge=1)
    feed_max_bytes: int = Field(512 * 1024 * 1024, ge=1)

    #: How long the ledger keeps finished jobs. When it is embedded they stay in the engine's file for that long.
    retention_days: float = Field(30, gt=0)
    #: Connections of each process to PostgreSQL, for writing; queries take as many again, for a moment.
    ledger_pool_size: int = Field(5, ge=1)
    #: Whether workers bring the feed into the ledger; without it `holdfast upkeep` must run.
    projector: bool = True
    #: How often to look for jobs that the engine has lost; 0 turns it off.
    reconcile_interval_s: float = Field(300, ge=0)
    #: How long a durable submission waits for the ledger.
    durable_timeout_s: float = Field(10, gt=0)

    concurrency: int = Field(100, ge=1)
    drain_grace_s: float = Field(30, ge=0)

    connect_timeout_s: float = Field(5, gt=0)
    #: A store that accepts connections but does not answer counts as down after this long.
    reply_timeout_s: float = Field(10, gt=0)

    @classmethod
    def load(cls, **overrides: Any) -> Settings:
        """Settings from everywhere; a mistake is an `InvalidOption` that names it."""
        given = {name: value for name, value in overrides.items() if value is not None}
        try:
            return cls(**given)
        except ValidationError as exc:
            raise InvalidOption("settings: " + "; ".join(map(_named, exc.errors()))) from exc

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, url: str) -> str:
        scheme, separator, _ = url.partition("://")
        if not separator or scheme not in _SCHEMES + _RESERVED:
            raise ValueError(f"must begin with one of {', '.join(s + '://' for s in _SCHEMES)}")
        return url

    @field_validator("ledger")
    @classmethod
    def _known_ledger(cls, ledger: str | None) -> str | None:
        # Empty is what a shell makes of "not set".
        if not ledger:
            return None
        scheme, separator, _ = ledger.partition("://")
        if not separator or scheme not in _LEDGER_SCHEMES:
            raise ValueError("must begin with postgresql:// or sqlite:///")
        return ledger

    @model_validator(mode="after")
    def _retention_covers_the_window(self) -> Self:
        if self.retention_days * _DAY_S < self.idempotency_window_s:
            raise ValueError(
                "retention_days (HOLDFAST_RETENTION_DAYS) must not be shorter than idempotency_window_s "
                "(HOLDFAST_IDEMPOTENCY_WINDOW_S): after a wipe the ledger knows the keys"
            )
        return self

    @model_validator(mode="after")
    def _heartbeat_within_lease(self) -> Self:
        if self.heartbeat_interval_s * 2 > self.visibility_timeout_s:
            raise ValueError(
                "heartbeat_interval_s (HOLDFAST_HEARTBEAT_INTERVAL_S) must be at most half of visibility_timeout_s "
                "(HOLDFAST_VISIBILITY_TIMEOUT_S), or leases are lost"
            )
        return self

    @property
    def embedded(self) -> bool:
        """Whether the engine's file is the ledger."""
        if not self.url.startswith("sqlite:"):
            return False
        return self.ledger is None or _same_file(self.url, self.ledger)

    @property
    def _finished_ttl_s(self) -> float:
        chosen = "finished_ttl_s" in self.model_fields_set and "retention_days" not in self.model_fields_set
        return self.finished_ttl_s if not self.embedded or chosen else self.retention_days * _DAY_S

    def engine_options(self) -> EngineOptions:
        """The part that an engine needs."""
        return EngineOptions(
            visibility_timeout_ms=max(1, round(self.visibility_timeout_s * 1000)),
            payload_limit=self.payload_limit,
            max_deliveries=self.max_deliveries,
            finished_ttl_ms=max(1, round(self._finished_ttl_s * 1000)),
            idempotency_window_ms=max(1, round(self.idempotency_window_s * 1000)),
            ledger=self.ledger is not None and not self.embedded,
            retry_via=self.retry_via,
            pending_idle_ms=round(self.reclaim_idle_s * 1000),
            result_limit=self.result_limit,
            result_ttl_ms=max(1, round(self.result_ttl_s * 1000)),
            feed_limit=self.feed_limit,
            feed_max_bytes=self.feed_max_bytes,
        )


def _named(error: ErrorDetails) -> str:
    """A mistake, by the setting's name and its variable."""
    said = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        # Of several settings, which it names itself.
        return said
    name = str(error["loc"][0])
    place = ".".join(map(str, error["loc"]))
    return f"{place} (HOLDFAST_{name.upper()}): {said}" if name in Settings.model_fields else f"{place}: {said}"


def _same_file(url: str, other: str) -> bool:
    one, two = urlsplit(url), urlsplit(other)
    if one.scheme != two.scheme:
        return False
    return Path(unquote(one.path[1:])).resolve() == Path(unquote(two.path[1:])).resolve()
