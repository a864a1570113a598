"""Ids, priorities, tokens and the bounded history."""

from __future__ import annotations

import time
from collections import Counter
from uuid import UUID

import pytest

from holdfast.clock import SystemClock, to_datetime, to_ms
from holdfast.core.job import (
    HISTORY_FIRST,
    HISTORY_LATEST,
    Attempt,
    Lease,
    Meta,
    Priority,
    append_attempt,
    new_job_ids,
    priority_order,
)


@pytest.mark.parametrize("count", [0, 1, 7, 1_000])
def test_ids_are_unique_and_of_version_seven(count: int) -> None:
    ids = new_job_ids(count)
    assert len(set(ids)) == len(ids) == count
    for job_id in ids:
        parsed = UUID(hex=job_id)
        assert (len(job_id), parsed.version, parsed.variant) == (32, 7, "specified in RFC 4122")


def test_ids_begin_with_the_time_so_that_later_ones_sort_later() -> None:
    before = time.time_ns() // 1_000_000
    (job_id,) = new_job_ids(1)
    after = time.time_ns() // 1_000_000
    assert before <= int(job_id[:12], 16) <= after


def test_ids_of_one_batch_differ_in_all_their_random_parts() -> None:
    ids = new_job_ids(500)
    assert len({job_id[13:16] for job_id in ids}) > 400
    assert len({job_id[17:] for job_id in ids}) == 500
    assert {job_id[16] for job_id in ids} == set("89ab")


def test_every_round_reads_every_priority_and_none_starves() -> None:
    orders = [priority_order(round_number) for round_number in range(800)]
    assert all(sorted(order) == sorted(Priority) for order in orders)
    first = Counter(order[0] for order in orders)
    assert first[Priority.HIGH] > first[Priority.NORMAL] > first[Priority.LOW] >= 100


def test_a_token_names_one_attempt() -> None:
    lease = Lease("default", "j1", "5-1", 2, "w1")
    assert lease.token == "5-1:2:w1"
    others = [Lease("default", "j1", *fence) for fence in [("5-1", 1, "w1"), ("5-1", 2, "w2"), ("5-2", 2, "w1")]]
    assert lease.token not in {other.token for other in others}


def test_history_keeps_the_first_and_the_latest_attempts() -> None:
    history: tuple[Attempt, ...] = ()
    for number in range(1, 101):
        history = append_attempt(history, Attempt(number, "w", 0, 0, "retrying"))
    numbers = [attempt.number for attempt in history]
    assert numbers[:HISTORY_FIRST] == [1, 2, 3, 4, 5]
    assert numbers[HISTORY_FIRST:] == list(range(101 - HISTORY_LATEST, 101))


def test_a_new_job_has_default_metadata() -> None:
    meta = Meta()
    assert (meta.retry_count, meta.lost_leases, meta.history, meta.priority) == (0, 0, (), Priority.NORMAL)


def test_the_clock_is_in_whole_milliseconds_of_utc() -> None:
    now_ms = SystemClock().now_ms()
    assert abs(now_ms - time.time() * 1000) < 5_000
    instant = to_datetime(1_700_000_000_123)
    assert instant.isoformat(timespec="milliseconds") == "2023-11-14T22:13:20.123+00:00"
    assert to_ms(instant - to_datetime(1_700_000_000_000)) == 123
