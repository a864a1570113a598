"""What a run of the acceptance criteria says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from holdfast.acceptance.stage import Stage


class Verdict(StrEnum):
    """On one criterion."""

    PASSED = "passed"
    FAILED = "failed"
    #: The deployment lacks what it is about (a ledger, say).
    NOT_APPLICABLE = "not applicable"


class Criterion(msgspec.Struct, frozen=True):
    """One thing that must hold. `check` returns what it saw, or raises `Unmet` or `NotApplicable`."""

    id: str
    title: str
    #: What is done to find out.
    done: str
    check: Callable[[Stage], Awaitable[str]]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one criterion."""

    id: str
    title: str
    done: str
    verdict: Verdict
    #: What was seen; why it failed; why it does not apply.
    seen: str
    seconds: float


class Report(msgspec.Struct, kw_only=True):
    """What came of all of them."""

    namespace: str
    url: str
    ledger: str | None
    results: list[Result] = []
    seconds: float = 0.0
    #: What else a person should know: remains of a run that was killed, say.
    notes: list[str] = []

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.count(Verdict.FAILED)

    def count(self, verdict: Verdict) -> int:
        """How many criteria have this verdict."""
        return sum(result.verdict is verdict for result in self.results)


class Unmet(Exception):
    """The criterion does not hold; the message says what was seen instead."""


class NotApplicable(Exception):
    """There is nothing here that the criterion could be about; the message says why."""


def check(condition: object, seen: str) -> None:
    """Raise `Unmet` unless the condition holds."""
    if not condition:
        raise Unmet(seen)


def same(what: str, found: Any, wanted: Any) -> None:
    """Raise `Unmet` unless both are equal."""
    if found != wanted:
        raise Unmet(f"{what}: {_plain(found)} instead of {_plain(wanted)}")


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_plain, value)) + "]"
    return str(value) if isinstance(value, str) and value else repr(value)
