"""What commands have in common that work until they are told to end."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.cli.signals import on_signals


@contextmanager
def staying(stop: Callable[[], None]) -> Iterator[None]:
    """As `on_signals`, for a command that works until it is told to end."""
    leave_loaded_alone()
    with on_signals(stop):
        yield


def leave_loaded_alone() -> None:
    """Code stays until the end: the garbage collector need not look at it again in the middle of the work.

    It is most of what a process has, and each full collection is a pause of some 40 ms that finds none of it.
    """
    gc.freeze()
