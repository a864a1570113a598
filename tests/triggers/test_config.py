"""Configuration of a trigger: defaults, derived values, invalid values."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from holdfast.triggers.config import QueueTriggerConfig, RuntimeConfig, TriggerEntry

COMPLETE: dict[str, Any] = {
    "queue_name": "orders",
    "consumer_group": "shop",
    "adapter": {"type": "memory"},
    "runtime": {"task": "ship"},
}


def paths(model: type[QueueTriggerConfig], **fields: Any) -> set[str]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(fields)
    return {".".join(map(str, error["loc"])) for error in caught.value.errors()}


def test_the_defaults_are_those_of_the_requirements() -> None:
    config = QueueTriggerConfig(queue_name="orders", consumer_group="shop").model_dump(mode="json")
    assert config == {
        "queue_name": "orders",
        "consumer_group": "shop",
        "name": "orders",
        "concurrency": 1,
        "ack_policy": "ack",
        "max_retries": 3,
        "retry_backoff_base": 1.0,
        "retry_backoff_multiplier": 2.0,
        "enable_dedup": True,
        "idempotency_window": 3600,
        "dedup_down": "hold",
        "parser_type": "json",
        "event_name_header": "x-event-name",
        "dedup_header": "x-dedup-key",
        "tenant_header": "x-tenant-id",
        "tenants": None,
        "focus": None,
        "dlq_name": None,
        "prefetch": 10,
        "metrics": {"enabled": True, "export_interval": 15},
    }


@pytest.mark.parametrize(("concurrency", "prefetch"), [(1, 10), (5, 10), (6, 12), (100, 200)])
def test_the_prefetch_follows_the_concurrency(concurrency: int, prefetch: int) -> None:
    assert QueueTriggerConfig(queue_name="q", consumer_group="g", concurrency=concurrency).prefetch == prefetch


def test_the_window_in_milliseconds() -> None:
    assert QueueTriggerConfig(queue_name="q", consumer_group="g", idempotency_window=1.5).idempotency_window_ms == 1500
    assert QueueTriggerConfig(queue_name="q", consumer_group="g", idempotency_window=1e-9).idempotency_window_ms == 1


def test_header_names_are_compared_in_lower_case() -> None:
    config = QueueTriggerConfig(queue_name="q", consumer_group="g", dedup_header="X-Dedup-Key")
    assert config.dedup_header == "x-dedup-key"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("queue_name", ""),
        ("consumer_group", ""),
        ("name", "a b"),
        ("name", "a/b"),
        ("name", "x" * 201),
        ("concurrency", 0),
        ("ack_policy", "maybe"),
        ("max_retries", -1),
        ("retry_backoff_base", 0),
        ("retry_backoff_multiplier", 0.99),
        ("retry_backoff_multiplier", float("nan")),
        ("retry_backoff_base", float("inf")),
        ("idempotency_window", 0),
        ("dedup_down", "ignore"),
        ("parser_type", "xml"),
        ("event_name_header", "x name"),
        ("tenant_header", ""),
        ("dlq_name", "orders"),
        ("dlq_name", ""),
        ("prefetch", -1),
        ("colour", "red"),
    ],
)
def test_invalid_values_are_refused_by_path(field: str, value: Any) -> None:
    assert paths(TriggerEntry, **COMPLETE | {field: value}) == {field}


def test_a_prefetch_below_the_concurrency_is_refused() -> None:
    assert paths(TriggerEntry, **COMPLETE, concurrency=20, prefetch=19) == {"prefetch"}
    assert TriggerEntry.model_validate(COMPLETE | {"concurrency": 20, "prefetch": 20}).prefetch == 20


def test_a_queue_name_that_is_not_valid_in_a_url_needs_a_separate_name() -> None:
    assert paths(TriggerEntry, **COMPLETE | {"queue_name": "a/b"}) == {"name"}
    assert TriggerEntry.model_validate(COMPLETE | {"queue_name": "a/b", "name": "ab"}).queue_name == "a/b"


def test_all_errors_are_reported_at_once() -> None:
    found = paths(
        TriggerEntry,
        consumer_group="g",
        concurrency=50,
        prefetch=1,
        name="a b",
        adapter={"type": "memory", "colour": 1, "connection": {"colour": 1}},
        runtime={"url": "ftp://x"},
        metrics={"enabled": "perhaps"},
    )
    assert found == {
        "queue_name",
        "prefetch",
        "name",
        "adapter.colour",
        "adapter.connection.colour",
        "runtime.url",
        "metrics.enabled",
    }


def test_an_unknown_adapter_type_is_refused() -> None:
    assert paths(TriggerEntry, **COMPLETE | {"adapter": {"type": "carrier pigeon"}}) == {"adapter.type"}
    assert paths(TriggerEntry, **COMPLETE | {"adapter": {"connection": {"x": 1}}}) == {"adapter.type"}
    assert paths(TriggerEntry, **COMPLETE | {"adapter": "memory"}) == {"adapter"}


@pytest.mark.parametrize(
    "runtime",
    [
        {},
        {"task": "a", "url": "http://127.0.0.1"},
        {"task": "a", "callable": "m:f"},
        {"task": "a", "timeout": 3},
        {"callable": "m:f", "token": "x"},
        {"callable": "nothing"},
        {"callable": "m:1f"},
        {"task": ""},
        {"url": "127.0.0.1:80"},
        {"url": "http://ada:pw@127.0.0.1"},
        {"url": "http://127.0.0.1", "timeout": 0},
    ],
)
def test_exactly_one_valid_runtime_is_required(runtime: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        RuntimeConfig.model_validate(runtime)
    assert "ada:pw" not in str(caught.value)


def test_the_kinds_of_runtime() -> None:
    kinds = ({"task": "a"}, {"callable": "jobs.py:handle"}, {"url": "https://agent.example/run", "token": "t"})
    assert [RuntimeConfig.model_validate(kind).kind for kind in kinds] == ["task", "callable", "url"]
    assert "'t'" not in repr(RuntimeConfig.model_validate(kinds[2]))


def test_a_configuration_is_immutable() -> None:
    config = QueueTriggerConfig(queue_name="q", consumer_group="g")
    with pytest.raises(ValidationError):
        config.concurrency = 5  # type: ignore[misc]
