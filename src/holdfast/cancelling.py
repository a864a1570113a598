"""Whose cancellation it is: ours to obey, or something that a library or a user's function raised."""

from __future__ import annotations

import asyncio


def was_cancelled(exc: BaseException) -> bool:
    """Whether the error is a cancellation of the current task, which has to end then."""
    task = asyncio.current_task()
    return isinstance(exc, asyncio.CancelledError) and (task is None or task.cancelling() > 0)


def obey_cancellation() -> None:
    """Raises `CancelledError` if the current task has been told to end, and a library has made something else of it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
