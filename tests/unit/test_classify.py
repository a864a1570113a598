"""Exceptions as failures: their kind, and what is recorded of them."""

from __future__ import annotations

import pytest

from holdfast.core.verdict import FailureKind
from holdfast.errors import EngineUnavailable, Fatal, InvalidPayload, Unavailable
from holdfast.execution.invoke import (
    MESSAGE_LIMIT,
    STACK_LIMIT,
    describe_failure,
    failure_outcome,
    invalid_payload,
    process_died,
)
from holdfast.execution.spec import TaskPolicy

NAMED = TaskPolicy(retry_on=(OSError,), fatal_on=(FileNotFoundError,), unavailable_on=(ConnectionError,))


@pytest.mark.parametrize(
    ("error", "policy", "kind"),
    [
        (ValueError(), TaskPolicy(), FailureKind.RETRYABLE),
        (Fatal(), TaskPolicy(), FailureKind.FATAL),
        (Unavailable(), TaskPolicy(), FailureKind.UNAVAILABLE),
        (EngineUnavailable(), TaskPolicy(), FailureKind.UNAVAILABLE),
        (InvalidPayload(), TaskPolicy(), FailureKind.FATAL),
        (OSError(), NAMED, FailureKind.RETRYABLE),
        (ValueError(), NAMED, FailureKind.FATAL),
        (FileNotFoundError(), NAMED, FailureKind.FATAL),
        (ConnectionResetError(), NAMED, FailureKind.UNAVAILABLE),
        (InvalidPayload(), TaskPolicy(retry_on=(InvalidPayload,)), FailureKind.RETRYABLE),
        (Unavailable(), NAMED, FailureKind.UNAVAILABLE),
        (Fatal(), TaskPolicy(retry_on=(Fatal,)), FailureKind.FATAL),
        (ExceptionGroup("g", [Unavailable(), Unavailable()]), TaskPolicy(), FailureKind.UNAVAILABLE),
        (ExceptionGroup("g", [Unavailable(), ValueError()]), TaskPolicy(), FailureKind.RETRYABLE),
        (ExceptionGroup("g", [ExceptionGroup("h", [Fatal()]), ValueError()]), TaskPolicy(), FailureKind.FATAL),
        (ExceptionGroup("g", [Fatal()]), TaskPolicy(retry_on=(ExceptionGroup,)), FailureKind.RETRYABLE),
    ],
    ids=repr,
)
def test_exceptions_are_classified(error: BaseException, policy: TaskPolicy, kind: FailureKind) -> None:
    assert failure_outcome(error, policy).kind is kind


def test_a_recorded_failure_is_bounded() -> None:
    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        raise ValueError("x" * 10_000)

    with pytest.raises(ValueError, match="x") as caught:
        deep(3)
    failure = describe_failure("CODE", caught.value)
    assert (failure.code, failure.type, failure.message) == ("CODE", "ValueError", "x" * MESSAGE_LIMIT)
    assert len(failure.stack) == STACK_LIMIT
    assert failure.stack.endswith("x\n")


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_exceptions_without_a_readable_message_are_recorded() -> None:
    failure = describe_failure("CODE", UnreadableError())
    assert failure.message == "(its message cannot be read: RuntimeError)"
    assert failure.type.endswith("test_classify.UnreadableError")
    describe_failure("CODE", ValueError("lone \ud800 surrogate")).message.encode()
    assert invalid_payload(KeyError("k")).failure.code == "INVALID_PAYLOAD"


def test_the_exit_of_a_process_is_described() -> None:
    assert "killed by signal 9" in process_died(-9).failure.message
    assert "exited (1)" in process_died(1).failure.message
