"""Times that come from outside."""

from __future__ import annotations

from datetime import UTC, datetime


def moment(milliseconds: int) -> datetime:
    """The time so long after 1970; now, if no calendar has it: writers put other units into the same field."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return datetime.now(UTC)
