"""Pages of lists."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from holdfast.errors import Unknown, UsageError

P = TypeVar("P")


async def paged(cursor: str | None, page: Awaitable[P]) -> P:
    """The page at a cursor. A cursor that nobody gave out is a page that is not there."""
    try:
        return await page
    except UsageError as exc:
        if cursor is None:
            raise
        raise Unknown("page", cursor[:40]) from exc
