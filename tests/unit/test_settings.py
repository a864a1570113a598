"""Settings: their sources, precedence, and invalid values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from holdfast import Holdfast, Retry
from holdfast.engine.port.jobs import EngineOptions, RetryVia
from holdfast.errors import InvalidOption
from holdfast.execution.backend import backend_of
from holdfast.settings import Settings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only the test's own file and variables."""
    monkeypatch.chdir(tmp_path)
    for name in Settings.model_fields:
        monkeypatch.delenv(f"HOLDFAST_{name.upper()}", raising=False)


def test_defaults() -> None:
    settings = Settings.load()
    assert settings.url == "sqlite:///holdfast.db"
    assert settings.ledger is None
    names = (settings.stream_task, settings.stream_result, settings.stream_dlq, settings.group)
    assert names == ("stream:task", "stream:result", "stream:dlq", "cg:workers")
    assert (settings.queue_retry, settings.queue_suspended, settings.namespace) == (
        "queue:retry",
        "queue:suspended",
        "",
    )
    assert (settings.visibility_timeout_s, settings.heartbeat_interval_s, settings.max_deliveries) == (30, 10, 5)
    assert (settings.reclaim, settings.reclaim_interval_s) == (True, 1)
    assert settings.payload_limit == 1024 * 1024


def test_arguments_beat_variables_and_variables_beat_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "holdfast.toml").write_text('group = "file"\nstream_task = "file"\nstream_dlq = "file"\n')
    monkeypatch.setenv("HOLDFAST_GROUP", "variable")
    monkeypatch.setenv("HOLDFAST_STREAM_TASK", "variable")
    settings = Settings.load(group="argument")
    assert (settings.group, settings.stream_task, settings.stream_dlq) == ("argument", "variable", "file")


def test_an_argument_of_none_leaves_the_setting_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_URL", "redis://localhost:1/0")
    assert Settings.load(url=None).url == "redis://localhost:1/0"


def test_a_retry_mode_can_be_set_per_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_RETRY_VIA", '{"ingest": "pending"}')
    assert Settings.load().retry_via == {"ingest": RetryVia.PENDING}


def test_the_long_lease_of_the_sources_is_valid() -> None:
    settings = Settings.load(visibility_timeout_s=300, heartbeat_interval_s=30)
    assert settings.engine_options().visibility_timeout_ms == 300_000


def test_zero_is_valid_where_a_reproduction_needs_it() -> None:
    settings = Settings.load(reclaim_interval_s=0, reclaim_idle_s=0, drain_grace_s=0)
    assert settings.engine_options().pending_idle_ms == 0


@pytest.mark.parametrize(
    "url", ["redis://h:1/0", "rediss://h", "redis+sentinel://h/m", "redis+cluster://h", "sqlite:///x"]
)
def test_known_schemes_pass(url: str) -> None:
    assert Settings.load(url=url).url == url


def test_the_error_for_a_scheme_lists_only_supported_ones() -> None:
    with pytest.raises(InvalidOption, match=r"must begin with one of sqlite://, redis://, rediss://, redis\+sent"):
        Settings.load(url="mysql://h")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"url": "mysql://h"}, "url"),
        ({"url": "holdfast.db"}, "url"),
        ({"visibility_timeout_s": 0}, "visibility_timeout_s"),
        ({"heartbeat_interval_s": 20}, "heartbeat_interval_s"),
        ({"max_deliveries": 0}, "max_deliveries"),
        ({"reclaim_batch": 501}, "reclaim_batch"),
        ({"namespace": "a b"}, "namespace"),
        ({"namespace": "{x}"}, "namespace"),
        ({"stream_task": ""}, "stream_task"),
        ({"retry_via": {"q": "sometimes"}}, "retry_via"),
        ({"concurrency": 0}, "concurrency"),
        ({"no_such_setting": 1}, "no_such_setting"),
        ({"ledger": "mysql://h/db"}, "ledger .*: .*postgresql://"),
        ({"ledger": "ledger.db"}, "ledger"),
        ({"retention_days": 0.5}, "retention_days .*must not be shorter"),
        ({"ledger_pool_size": 0}, "ledger_pool_size"),
        ({"durable_timeout_s": 0}, "durable_timeout_s"),
    ],
    ids=str,
)
def test_an_invalid_setting_is_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidOption, match=named):
        Settings.load(**wrong)


def test_an_invalid_setting_is_reported_once_with_its_variable() -> None:
    with pytest.raises(InvalidOption) as raised:
        Settings.load(heartbeat_interval_s=20, concurrency=100)
    assert str(raised.value) == (
        "settings: heartbeat_interval_s (HOLDFAST_HEARTBEAT_INTERVAL_S) must be at most half of visibility_timeout_s "
        "(HOLDFAST_VISIBILITY_TIMEOUT_S), otherwise leases expire"
    )
    with pytest.raises(InvalidOption) as raised:
        Settings.load(ledger="mysql://h", retry_via={"q": "sometimes"})
    assert "ledger (HOLDFAST_LEDGER): must begin with postgresql:// or sqlite:///" in str(raised.value)
    assert "retry_via.q (HOLDFAST_RETRY_VIA): " in str(raised.value)
    assert "Value error" not in str(raised.value)


def test_an_unknown_key_in_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "holdfast.toml").write_text("visibility_timeout = 3\n")
    with pytest.raises(InvalidOption, match="visibility_timeout: unknown setting; did you mean visibility_timeout_s"):
        Settings.load()


def test_an_empty_dead_letter_stream_name_is_valid() -> None:
    assert Settings.load(stream_dlq="").stream_dlq == ""


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Settings.load().group = "other"  # type: ignore[misc]


def test_the_engine_gets_whole_milliseconds_and_the_same_defaults() -> None:
    settings = Settings.load(url="redis://h")
    # An engine by itself keeps nothing behind its reader, and does not wait after an outage; a deployment does.
    assert settings.engine_options() == EngineOptions(feed_tail=settings.feed_tail, settle_ms=10_000)
    options = Settings.load(
        visibility_timeout_s=1.5, heartbeat_interval_s=0.5, ledger="sqlite:///l.db"
    ).engine_options()
    assert (options.visibility_timeout_ms, options.settle_ms, options.ledger) == (1_500, 500, True)


@pytest.mark.parametrize(
    ("url", "ledger", "embedded", "external"),
    [
        ("sqlite:///jobs.db", None, True, False),
        ("sqlite:///jobs.db", "", True, False),
        ("sqlite:///jobs.db", "sqlite:///jobs.db", True, False),
        ("sqlite:///jobs.db", "sqlite:///./jobs.db", True, False),
        ("sqlite:///jobs.db", "sqlite:///ledger.db", False, True),
        ("sqlite:///jobs.db", "postgres://h/db", False, True),
        ("redis://h", None, False, False),
        ("redis://h", "sqlite:///ledger.db", False, True),
        ("redis://h", "postgresql://h/db", False, True),
    ],
)
def test_embedded_and_separate_ledgers_are_distinguished(
    url: str, ledger: str | None, embedded: bool, external: bool
) -> None:
    settings = Settings.load(url=url, ledger=ledger)
    assert (settings.embedded, settings.engine_options().ledger) == (embedded, external)


def test_an_embedded_ledger_keeps_finished_jobs_for_the_retention() -> None:
    day_ms = 86_400_000
    assert Settings.load().engine_options().finished_ttl_ms == 30 * day_ms
    assert Settings.load(retention_days=7, finished_ttl_s=5).engine_options().finished_ttl_ms == 7 * day_ms
    assert Settings.load(finished_ttl_s=5).engine_options().finished_ttl_ms == 5_000
    assert Settings.load(ledger="postgresql://h/db").engine_options().finished_ttl_ms == 3_600_000


# In memory -----------------------------------------------------------------------------------------

EXTERNAL = {
    "HOLDFAST_LEDGER": "postgresql://prod/ledger",
    "HOLDFAST_OUTBOX_URL": "postgresql://prod/shop",
    "HOLDFAST_OUTBOX_TARGETS": '{"default": {"type": "kafka", "connection": {"bootstrap.servers": "prod"}}}',
    "HOLDFAST_WEBHOOK_SECRET": "whsec_QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVowMTIzNDU=",
    "HOLDFAST_WEBHOOKS": '[{"url": "https://hooks.example.org", "events": ["job.*"]}]',
}


def external_settings(settings: Settings) -> list[str]:
    """Names of the settings that refer to other systems."""
    values = {
        "ledger": settings.ledger,
        "outbox_url": settings.outbox_url,
        "outbox_targets": settings.outbox_targets,
        "publish_events": settings.publish_events,
        "webhooks": settings.webhooks_enabled,
    }
    return [name for name, value in values.items() if value]


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite:///%3Amemory:"])
@pytest.mark.parametrize("source", ["argument", "variable", "file"])
def test_in_memory_settings_from_outside_the_code_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str, source: str
) -> None:
    for name, value in EXTERNAL.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOLDFAST_CONCURRENCY", "7")
    (tmp_path / "holdfast.toml").write_text(
        'ledger = "postgresql://prod/ledger"\ngroup = "file"\n' + (f'url = "{url}"\n' if source == "file" else "")
    )
    if source == "variable":
        monkeypatch.setenv("HOLDFAST_URL", url)
    settings = Settings.load(url=url if source == "argument" else None)
    assert settings.in_memory
    assert settings.embedded
    assert external_settings(settings) == []
    # The rest is as configured.
    assert (settings.concurrency, settings.group) == (7, "file")


def test_in_memory_events_are_not_published_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_OUTBOX_TARGETS", EXTERNAL["HOLDFAST_OUTBOX_TARGETS"])
    monkeypatch.setenv("HOLDFAST_PUBLISH_EVENTS", "default")
    assert Settings.load(url="sqlite://").publishing is None
    assert Settings.load(url="sqlite:///jobs.db").publishing is not None


def test_in_memory_explicit_arguments_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_LEDGER", "postgresql://prod/ledger")
    settings = Settings.load(
        url="sqlite://", ledger="sqlite:///mine.db", webhook_secret=EXTERNAL["HOLDFAST_WEBHOOK_SECRET"]
    )
    assert (settings.ledger, settings.webhooks_enabled, settings.embedded) == ("sqlite:///mine.db", True, False)


@pytest.mark.parametrize("url", ["sqlite:///jobs.db", "sqlite:////var/jobs.db", "redis://h"])
def test_other_engines_use_the_configured_settings(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HOLDFAST_URL", "sqlite://")
    for name, value in EXTERNAL.items():
        monkeypatch.setenv(name, value)
    settings = Settings.load(url=url)
    assert not settings.in_memory
    assert external_settings(settings) == ["ledger", "outbox_url", "outbox_targets", "webhooks"]


# Retries -------------------------------------------------------------------------------------------


def test_retries_are_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Settings.load().retry == Retry()
    (tmp_path / "holdfast.toml").write_text("max_retries = 9\nretry_base_s = 5\nretry_multiplier = 3\n")
    monkeypatch.setenv("HOLDFAST_MAX_RETRIES", "7")
    monkeypatch.setenv("HOLDFAST_RETRY_CAP_S", "600")
    monkeypatch.setenv("HOLDFAST_RETRY_JITTER_S", "0")
    expected = Retry(7, base=5, multiplier=3, cap=600, jitter=None)
    assert Settings.load().retry == expected
    app = Holdfast("sqlite://")

    @app.task
    def plain() -> None: ...

    @app.task(retry=Retry(1))
    def own() -> None: ...

    specs = backend_of(app).specs
    assert (specs["plain"].policy.retry, specs["own"].policy.retry) == (expected, Retry(1))
    app.configure(max_retries=0)
    assert specs["plain"].policy.retry.max_retries == 0
    assert specs["own"].policy.retry == Retry(1)
    assert Holdfast("sqlite://", retry=Retry(2)).task(plain.function).spec.policy.retry == Retry(2)


@pytest.mark.parametrize(
    ("name", "value"),
    [("MAX_RETRIES", "-1"), ("RETRY_BASE_S", "inf"), ("RETRY_MULTIPLIER", "0.5"), ("RETRY_CAP_S", "soon")],
)
def test_invalid_retries_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"HOLDFAST_{name}", value)
    with pytest.raises(InvalidOption, match=f"HOLDFAST_{name}"):
        Settings.load()
