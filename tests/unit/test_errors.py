"""Errors: one tree, stable codes, ids as attributes, messages with a remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import pytest

from holdfast import errors
from holdfast.errors import (
    DuplicateTask,
    EffectInDoubt,
    EffectMismatch,
    EngineUnavailable,
    Fatal,
    FeedFull,
    HoldfastError,
    IntakeRefused,
    InvalidPayload,
    JobCancelled,
    JobFailed,
    MissingExtra,
    NotDurableYet,
    PayloadTooLarge,
    SchemaMismatch,
    StaleLease,
    TaskNotAnnounced,
    TransitionInvalid,
    Unavailable,
    UnknownJob,
    UnknownTask,
    UsageError,
    WaitTimeout,
)


def tree(root: type[HoldfastError]) -> Iterator[type[HoldfastError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


ALL = list(tree(HoldfastError))

EXAMPLES: list[HoldfastError] = [
    UnknownTask("send", ("mail", "sms")),
    UnknownTask("send"),
    TaskNotAnnounced("send"),
    TaskNotAnnounced("send", ["sned"]),
    DuplicateTask("send"),
    PayloadTooLarge("the arguments", 2_000_000, 1_048_576),
    UnknownJob("j1"),
    MissingExtra("redis://", ("hiredis",), ("redis",)),
    EffectMismatch("k", "it belongs to publish"),
    TransitionInvalid("j1", "succeeded", "running"),
    TransitionInvalid("j1", None, "running"),
    StaleLease("j1"),
    SchemaMismatch("postgresql://db/x", None, "0002"),
    SchemaMismatch("postgresql://db/x", "0001", "0002"),
    EffectInDoubt("charge", "its worker was lost"),
    NotDurableYet("j1", timedelta(seconds=10)),
    JobFailed("j1", "failed", "TASK_ERROR", "boom"),
    JobCancelled("j1", "cancelled", None, None),
    WaitTimeout("j1", "running", timedelta(seconds=1.5)),
    IntakeRefused("default", "an operator paused it"),
    FeedFull("default", "its feed is full; bring the ledger back"),
    EngineUnavailable("Redis does not answer"),
    Fatal("never"),
]


def test_every_error_has_a_unique_code() -> None:
    code_counts = Counter(kind.code for kind in ALL)
    assert [code for code, count in code_counts.items() if count > 1] == []
    assert all(code == code.upper() for code in code_counts)


def test_the_codes_are_stable() -> None:
    assert {kind.__name__: kind.code for kind in ALL} == {
        "HoldfastError": "HOLDFAST_ERROR",
        "BrokerUnavailable": "BROKER_UNAVAILABLE",
        "BrokerRefused": "BROKER_REFUSED",
        "UsageError": "USAGE_ERROR",
        "ReplayKeyReused": "REPLAY_KEY_REUSED",
        "UnknownTask": "UNKNOWN_TASK",
        "TaskNotAnnounced": "TASK_NOT_ANNOUNCED",
        "DuplicateTask": "DUPLICATE_TASK",
        "InvalidPayload": "INVALID_PAYLOAD",
        "InvalidResult": "INVALID_RESULT",
        "PayloadTooLarge": "PAYLOAD_TOO_LARGE",
        "IdempotencyKeyReused": "IDEMPOTENCY_KEY_REUSED",
        "InvalidOption": "INVALID_OPTION",
        "UnknownJob": "UNKNOWN_JOB",
        "AmbiguousId": "AMBIGUOUS_ID",
        "EffectMismatch": "EFFECT_MISMATCH",
        "SignatureInvalid": "WEBHOOK_SIGNATURE_INVALID",
        "TransitionInvalid": "WF_STATE_TRANSITION_INVALID",
        "StaleLease": "STALE_LEASE",
        "SchemaMismatch": "SCHEMA_MISMATCH",
        "RunEnded": "RUN_ENDED",
        "EffectInDoubt": "EFFECT_IN_DOUBT",
        "StepMismatch": "STEP_MISMATCH",
        "JobFailed": "JOB_FAILED",
        "JobCancelled": "JOB_CANCELLED",
        "WaitTimeout": "WAIT_TIMEOUT",
        "IntakeRefused": "INTAKE_REFUSED",
        "FeedFull": "FEED_FULL",
        "FeedDetached": "FEED_DETACHED",
        "NotDurableYet": "NOT_DURABLE_YET",
        "Unavailable": "UNAVAILABLE",
        "EngineUnavailable": "ENGINE_UNAVAILABLE",
        "EngineRefused": "ENGINE_REFUSED",
        "QueueUnverified": "QUEUE_UNVERIFIED",
        "LedgerUnavailable": "LEDGER_UNAVAILABLE",
        "LedgerRefused": "LEDGER_REFUSED",
        "Fatal": "FATAL",
        "NoLedger": "NO_LEDGER",
        "MissingExtra": "MISSING_EXTRA",
        "Denied": "GUARD_DENIED",
        "GuardFailed": "GUARD_FAILED",
        "Unauthorized": "UNAUTHORIZED",
        "Forbidden": "FORBIDDEN",
        "NotFound": "NOT_FOUND",
        "NameNotDistinct": "NAME_NOT_DISTINCT",
        "Conflict": "CONFLICT",
        "ConcurrencyLimited": "CONCURRENCY_LIMITED",
        "AlreadyReplayed": "ALREADY_REPLAYED",
        "ControlChanged": "CONTROL_CHANGED",
        "ApprovalVoid": "APPROVAL_VOID",
        "IntakeLimited": "INTAKE_LIMITED",
        "QueueLimitReached": "QUEUE_LIMIT_REACHED",
    }


def test_retryable_and_usage_errors_are_separate() -> None:
    assert issubclass(EngineUnavailable, Unavailable)
    assert issubclass(InvalidPayload, UsageError)
    assert not issubclass(Unavailable, UsageError)
    assert issubclass(JobCancelled, JobFailed)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_messages_are_readable(error: HoldfastError) -> None:
    text = str(error)
    assert len(text) > 4
    assert not text.endswith((":", " "))
    assert "None" not in text


def test_ids_are_attributes() -> None:
    assert UnknownTask("send").task == "send"
    assert UnknownJob("j1").job_id == "j1"
    failed = JobFailed("j1", "failed", "TASK_ERROR", "boom")
    assert (failed.job_id, failed.state, failed.error_code) == ("j1", "failed", "TASK_ERROR")
    assert WaitTimeout("j1", "queued", timedelta(seconds=2)).state == "queued"
    refused = IntakeRefused("default", "paused")
    assert (refused.queue, refused.reason) == ("default", "paused")


def test_known_tasks_are_listed_for_an_unknown_one() -> None:
    assert "mail, sms" in str(UnknownTask("send", ("mail", "sms")))
