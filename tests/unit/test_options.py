"""Valid and invalid options of a submission."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from holdfast.client.options import Options, SubmitOptions, make_options, parse_priority
from holdfast.core.job import EMPTY_META, Priority
from holdfast.core.retry import Retry
from holdfast.core.text import check_name
from holdfast.errors import InvalidOption, InvalidPayload, PayloadTooLarge


def make(**given: Any) -> Options:
    options: SubmitOptions = given  # type: ignore[assignment]
    return make_options(options, queue="default", priority=Priority.NORMAL, payload_limit=100)


def test_no_options_are_the_defaults() -> None:
    assert make() == Options()
    assert make().meta is EMPTY_META
    assert make(**dict.fromkeys(SubmitOptions.__annotations__.keys() - {"hold"})) == Options()


def test_all_options_reach_the_envelope() -> None:
    options = make(
        idempotency_key="k",
        idempotency_window=timedelta(hours=1),
        delay=timedelta(seconds=1.5),
        priority="low",
        queue="mail",
        tenant_id="acme",
        retry=Retry(max_retries=1),
        trace_id="t",
        context={"at": datetime(2030, 1, 1, tzinfo=UTC)},
        hold=True,
    )
    envelope = options.envelope("id", "task", b"{}")
    assert (envelope.job_id, envelope.task, envelope.payload) == ("id", "task", b"{}")
    assert (envelope.queue, envelope.tenant_id, envelope.idempotency_key) == ("mail", "acme", "k")
    assert (envelope.delay_ms, envelope.run_at_ms, envelope.trace_id, envelope.hold) == (1_500, 0, "t", True)
    assert (envelope.meta.priority, envelope.meta.retry) == (Priority.LOW, Retry(max_retries=1))
    assert envelope.meta.key_window_ms == 3_600_000
    assert envelope.meta.context == {"at": "2030-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("at", "ms"),
    [
        (datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), 1_000),
        (datetime(1970, 1, 1, 2, 0, 1, tzinfo=timezone(timedelta(hours=2))), 1_000),
        (datetime(1950, 1, 1, tzinfo=UTC), 1),
    ],
)
def test_run_at_is_in_milliseconds(at: datetime, ms: int) -> None:
    assert make(run_at=at).run_at_ms == ms


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"delay": -1}, "delay must not be negative"),
        ({"delay": timedelta(seconds=-1)}, "delay must not be negative, got -1 s"),
        ({"delay": "5"}, "delay must be a timedelta or a number"),
        ({"delay": float("nan")}, "is not a duration"),
        ({"run_at": datetime(2030, 1, 1)}, "run_at must be aware"),  # noqa: DTZ001
        ({"run_at": "2030-01-01"}, "run_at must be a datetime"),
        ({"delay": 1, "run_at": datetime(2030, 1, 1, tzinfo=UTC)}, "delay or run_at, not both"),
        ({"priority": "urgent"}, "priority must be one of high, normal, low"),
        ({"priority": 7}, "priority must be one of"),
        ({"priority": True}, "priority must be one of"),
        ({"queue": ""}, "queue must be a non-empty name"),
        ({"queue": "a b"}, "must not contain spaces"),
        ({"queue": "a{b}"}, "braces"),
        ({"queue": "x" * 201}, "queue has 201 bytes of UTF-8, the limit is 200"),
        ({"queue": "ü" * 101}, "queue has 202 bytes of UTF-8, the limit is 200"),
        ({"tenant_id": "😀" * 51}, "tenant_id has 204 bytes"),
        ({"tenant_id": ""}, "tenant_id must be a non-empty name"),
        ({"tenant_id": 7}, "tenant_id must be a non-empty name"),
        ({"idempotency_key": ""}, "idempotency_key must be a non-empty text"),
        ({"idempotency_key": "x" * 1_001}, "1001 bytes"),
        ({"idempotency_key": "😀" * 251}, "idempotency_key has 1004 bytes of UTF-8, the limit is 1000"),
        ({"idempotency_window": 5}, "give both"),
        ({"idempotency_key": "k", "idempotency_window": 0}, "must be more than 0"),
        ({"idempotency_key": "k", "idempotency_window": "5"}, "idempotency_window must be a timedelta or a number"),
        ({"trace_id": "ü" * 501}, "trace_id has 1002 bytes"),
        ({"trace_id": ""}, "trace_id must be a non-empty text"),
        ({"retry": 3}, r"retry must be a Retry\(…\)"),
        ({"context": [1]}, "context must be a mapping"),
        ({"context": {1: 2}}, "context must be a mapping"),
        ({"pirority": "high"}, "unknown option 'pirority'"),
    ],
    ids=str,
)
def test_invalid_options_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        make(**given)


def test_the_context_is_json_and_bounded() -> None:
    with pytest.raises(InvalidPayload, match="the context"):
        make(context={"a": object()})
    with pytest.raises(PayloadTooLarge):
        make(context={"a": "x" * 100})
    assert make(context={}).meta is EMPTY_META


def test_a_context_that_could_not_be_read_back_is_refused() -> None:
    deep: object = 0
    for _ in range(250):
        deep = [deep]
    with pytest.raises(InvalidPayload, match="the context is nested deeper than 200 levels"):
        make_options({"context": {"a": deep}}, queue="q", priority=Priority.NORMAL, payload_limit=10_000)


def test_priorities_are_parsed() -> None:
    assert [parse_priority(value) for value in ("HIGH", Priority.LOW, 1)] == [
        Priority.HIGH,
        Priority.LOW,
        Priority.NORMAL,
    ]


def test_names_with_colons_and_dots_are_valid() -> None:
    assert check_name("orders:eu.west-1_ü", "queue") == "orders:eu.west-1_ü"
