"""Why a try failed, in words that can be written anywhere, and when the next one is due."""

from __future__ import annotations

from typing import Final

from holdfast.errors import Denied, Fatal, IntakeRefused, Unavailable, UsageError
from holdfast.ledger.text import clean
from holdfast.observe.redact import bounded

REASON_LIMIT: Final = 1_000


def reason_of(exc: BaseException) -> str:
    """Why, in one line: what follows the first line of an error may quote the message."""
    try:
        text = str(exc)
    except Exception:  # noqa: BLE001 - an error without words is a failed try all the same
        text = ""
    text = " ".join(text.split()) if isinstance(exc, Denied) else text.partition("\n")[0]
    if not isinstance(exc, Denied | UsageError | Unavailable | Fatal | IntakeRefused):
        text = f"{type(exc).__name__}: {text}" if text else type(exc).__name__
    # Clean: it is to be written into headers and rows, and what cannot be encoded would hold the message for ever.
    return bounded(clean(text), REASON_LIMIT)


def delay_s(base: float, multiplier: float, number: int, cap_s: float) -> float:
    """base × multiplier^number, but no longer than the cap."""
    try:
        return min(cap_s, base * multiplier**number)
    except OverflowError:
        return cap_s
