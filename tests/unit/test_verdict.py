"""From outcome to verdict, and how a verdict changes a job's metadata."""

from __future__ import annotations

from random import Random

import pytest

from holdfast.core.job import Claim, Failure, Lease, Meta
from holdfast.core.retry import Retry
from holdfast.core.states import State, is_legal
from holdfast.core.verdict import (
    TARGETS,
    UNAVAILABLE_TOO_LONG,
    ApprovalNeeded,
    DeadLetter,
    Deferred,
    FailureKind,
    Hold,
    OnExhausted,
    Outcome,
    Raised,
    Release,
    RetryLater,
    Returned,
    Succeed,
    Suspend,
    Verdict,
    advance,
    judge,
)

FAILURE = Failure("TASK_ERROR", "boom", type="ValueError")
NO_JITTER = Retry(max_retries=3, jitter=None)
NOW_MS = 1_000_000


def claim(meta: Meta | None = None, *, deliveries: int = 1, attempt: int = 1) -> Claim:
    return Claim(
        lease=Lease("default", "j1", "1-0", deliveries, "w1"),
        task="t",
        payload=b"{}",
        tenant_id="default",
        idempotency_key="j1",
        trace_id="",
        attempt=attempt,
        created_at_ms=500,
        claimed_at_ms=900,
        meta=meta or Meta(),
    )


def judge_outcome(
    outcome: Outcome,
    meta: Meta | None = None,
    retry: Retry = NO_JITTER,
    on_exhausted: OnExhausted = OnExhausted.DEAD_LETTER,
) -> Verdict:
    return judge(claim(meta), outcome, retry, on_exhausted, Random(1), lambda: NOW_MS)


def raised(kind: FailureKind = FailureKind.RETRYABLE) -> Raised:
    return Raised(kind, FAILURE)


def test_a_returned_value_succeeds() -> None:
    assert judge_outcome(Returned(b"42")) == Succeed(b"42")


def test_a_deferred_job_is_released() -> None:
    assert judge_outcome(Deferred("draining")) == Release("draining")
    assert judge_outcome(Deferred("asleep", delay_ms=5, started=True)) == Release("asleep", 5, started=True)


def test_a_task_that_needs_approval_is_held() -> None:
    assert judge_outcome(ApprovalNeeded("please check")) == Hold("please check")


@pytest.mark.parametrize(("retry_count", "delay_ms"), [(0, 1_000), (1, 2_000), (2, 4_000)])
def test_three_retries_with_growing_delays(retry_count: int, delay_ms: int) -> None:
    assert judge_outcome(raised(), Meta(retry_count=retry_count)) == RetryLater(delay_ms, FAILURE)


@pytest.mark.parametrize(
    ("on_exhausted", "expected"),
    [(OnExhausted.DEAD_LETTER, DeadLetter(FAILURE)), (OnExhausted.SUSPEND, Suspend(FAILURE))],
)
def test_the_fourth_failure_ends_the_job_by_the_tasks_policy(on_exhausted: OnExhausted, expected: Verdict) -> None:
    assert judge_outcome(raised(), Meta(retry_count=3), on_exhausted=on_exhausted) == expected


def test_a_fatal_error_is_not_retried() -> None:
    assert judge_outcome(raised(FailureKind.FATAL)) == DeadLetter(FAILURE)
    assert judge_outcome(raised(FailureKind.FATAL), on_exhausted=OnExhausted.SUSPEND) == Suspend(FAILURE)


def test_an_invalid_payload_is_always_a_dead_letter() -> None:
    assert judge_outcome(raised(FailureKind.INVALID), on_exhausted=OnExhausted.SUSPEND) == DeadLetter(FAILURE)


def test_the_jobs_own_policy_overrides_the_tasks() -> None:
    own = Meta(retry=Retry(max_retries=1, base=7, jitter=None))
    assert judge_outcome(raised(), own) == RetryLater(7_000, FAILURE)
    spent = Meta(retry_count=1, retry=Retry(max_retries=1, base=7, jitter=None))
    assert judge_outcome(raised(), spent) == DeadLetter(FAILURE)


@pytest.mark.parametrize(("max_retries", "expected"), [(0, DeadLetter(FAILURE)), (5, RetryLater(1_000, FAILURE))])
def test_a_limit_on_the_message_overrides_the_policys(max_retries: int, expected: Verdict) -> None:
    assert judge_outcome(raised(), Meta(max_retries=max_retries), Retry(max_retries=1, jitter=None)) == expected


@pytest.mark.parametrize(("outages", "delay_ms"), [(0, 1_000), (1, 2_000), (4, 16_000), (500, 30_000)])
def test_an_outage_is_waited_out_without_using_up_retries(outages: int, delay_ms: int) -> None:
    meta = Meta(retry_count=3, unavailable_count=outages, unavailable_since_ms=1)
    assert judge_outcome(raised(FailureKind.UNAVAILABLE), meta) == RetryLater(delay_ms, FAILURE, counts=False)


def test_an_outage_has_a_deadline_if_one_is_set() -> None:
    policy = Retry(jitter=None, unavailable_deadline=10)
    in_time = Meta(unavailable_count=1, unavailable_since_ms=NOW_MS - 9_999)
    too_late = Meta(unavailable_count=1, unavailable_since_ms=NOW_MS - 10_000)
    assert judge_outcome(raised(FailureKind.UNAVAILABLE), retry=policy) == RetryLater(1_000, FAILURE, counts=False)
    assert judge_outcome(raised(FailureKind.UNAVAILABLE), in_time, policy) == RetryLater(2_000, FAILURE, counts=False)
    ended = judge_outcome(raised(FailureKind.UNAVAILABLE), too_late, policy)
    assert isinstance(ended, DeadLetter)
    assert (ended.failure.code, ended.failure.message) == (UNAVAILABLE_TOO_LONG, "boom")
    assert isinstance(judge_outcome(raised(FailureKind.UNAVAILABLE), too_late, policy, OnExhausted.SUSPEND), Suspend)


def test_every_verdict_is_a_legal_move_of_a_running_job() -> None:
    assert all(is_legal(State.RUNNING, target) for target in TARGETS.values())
    assert State.CANCELLED not in TARGETS.values()


def test_a_retry_is_counted_and_in_the_history() -> None:
    after = advance(claim(Meta(retry_count=1), attempt=2), RetryLater(5, FAILURE), NOW_MS)
    assert after.retry_count == 2
    (attempt,) = after.history
    assert (attempt.number, attempt.worker, attempt.started_at_ms, attempt.finished_at_ms) == (2, "w1", 900, NOW_MS)
    assert (attempt.outcome, attempt.failure) == ("retrying", FAILURE)


def test_an_outage_is_counted_separately_and_keeps_its_start() -> None:
    first = advance(claim(), RetryLater(5, FAILURE, counts=False), NOW_MS)
    assert (first.retry_count, first.unavailable_count, first.unavailable_since_ms) == (0, 1, 900)
    second = advance(
        claim(Meta(unavailable_count=1, unavailable_since_ms=100)), RetryLater(5, FAILURE, counts=False), 1
    )
    assert (second.unavailable_count, second.unavailable_since_ms) == (2, 100)


def test_an_ordinary_failure_ends_the_outage() -> None:
    after = advance(claim(Meta(unavailable_count=4, unavailable_since_ms=100)), RetryLater(5, FAILURE), NOW_MS)
    assert (after.retry_count, after.unavailable_count, after.unavailable_since_ms) == (1, 0, 0)


def test_lost_leases_are_added_up_across_messages() -> None:
    assert advance(claim(Meta(lost_leases=1), deliveries=3), RetryLater(5, FAILURE), 1).lost_leases == 3
    assert advance(claim(Meta(lost_leases=1), deliveries=2), Release("draining"), 1).lost_leases == 2
    assert advance(claim(), Succeed(b"null"), 1).lost_leases == 0


def test_an_unstarted_release_is_not_an_attempt() -> None:
    before = Meta(retry_count=2, unavailable_count=1, unavailable_since_ms=7)
    assert advance(claim(before), Release("draining"), NOW_MS) == before


def test_a_started_release_is_an_attempt_but_not_a_retry() -> None:
    after = advance(claim(Meta(retry_count=2)), Release("asleep", 5, started=True), NOW_MS)
    assert after.retry_count == 2
    assert [attempt.outcome for attempt in after.history] == ["queued"]


@pytest.mark.parametrize(
    ("verdict", "outcome"),
    [
        (Succeed(b"1"), "succeeded"),
        (DeadLetter(FAILURE), "dlq_pending"),
        (Suspend(FAILURE), "suspended"),
        (Hold("approval"), "waiting_approval"),
    ],
)
def test_every_end_of_an_attempt_is_in_the_history(verdict: Verdict, outcome: str) -> None:
    after = advance(claim(Meta(retry_count=1)), verdict, NOW_MS)
    assert [attempt.outcome for attempt in after.history] == [outcome]
    assert after.retry_count == 1
