"""What sort of failure an exception is, and what is kept of it."""

from __future__ import annotations

import pytest

from holdfast.core.verdict import Kind
from holdfast.errors import EngineUnavailable, Fatal, InvalidPayload, Unavailable
from holdfast.worker.classify import MESSAGE_LIMIT, STACK_LIMIT, failure, misfit, process_died, raised
from holdfast.worker.plan import Policy

NAMED = Policy(retry_on=(OSError,), fatal_on=(FileNotFoundError,), unavailable_on=(ConnectionError,))


@pytest.mark.parametrize(
    ("error", "policy", "kind"),
    [
        (ValueError(), Policy(), Kind.RETRYABLE),
        (Fatal(), Policy(), Kind.FATAL),
        (Unavailable(), Policy(), Kind.UNAVAILABLE),
        (EngineUnavailable(), Policy(), Kind.UNAVAILABLE),
        (InvalidPayload(), Policy(), Kind.FATAL),
        (OSError(), NAMED, Kind.RETRYABLE),
        (ValueError(), NAMED, Kind.FATAL),
        (FileNotFoundError(), NAMED, Kind.FATAL),
        (ConnectionResetError(), NAMED, Kind.UNAVAILABLE),
        (InvalidPayload(), Policy(retry_on=(InvalidPayload,)), Kind.RETRYABLE),
        (Unavailable(), NAMED, Kind.UNAVAILABLE),
        (Fatal(), Policy(retry_on=(Fatal,)), Kind.FATAL),
        (ExceptionGroup("g", [Unavailable(), Unavailable()]), Policy(), Kind.UNAVAILABLE),
        (ExceptionGroup("g", [Unavailable(), ValueError()]), Policy(), Kind.RETRYABLE),
        (ExceptionGroup("g", [ExceptionGroup("h", [Fatal()]), ValueError()]), Policy(), Kind.FATAL),
        (ExceptionGroup("g", [Fatal()]), Policy(retry_on=(ExceptionGroup,)), Kind.RETRYABLE),
    ],
    ids=repr,
)
def test_kinds(error: BaseException, policy: Policy, kind: Kind) -> None:
    assert raised(error, policy).kind is kind


def test_what_is_kept_is_bounded() -> None:
    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        raise ValueError("x" * 10_000)

    with pytest.raises(ValueError, match="x") as caught:
        deep(3)
    kept = failure("CODE", caught.value)
    assert (kept.code, kept.type, kept.message) == ("CODE", "ValueError", "x" * MESSAGE_LIMIT)
    assert len(kept.stack) == STACK_LIMIT
    assert kept.stack.endswith("x\n")


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_exceptions_that_cannot_be_read_are_kept_all_the_same() -> None:
    kept = failure("CODE", Rude())
    assert kept.message == "(its message cannot be read: RuntimeError)"
    assert kept.type.endswith("test_classify.Rude")
    failure("CODE", ValueError("lone \ud800 surrogate")).message.encode()
    assert misfit(KeyError("k")).failure.code == "INVALID_PAYLOAD"


def test_how_a_process_died() -> None:
    assert "killed by signal 9" in process_died(-9).failure.message
    assert "exited (1)" in process_died(1).failure.message
