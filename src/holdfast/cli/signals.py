"""Commands that stay. SIGTERM, SIGINT and SIGHUP: the first asks them to finish, the second to hurry."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_ENDINGS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at every such signal that comes while the block runs."""
    loop = asyncio.get_running_loop()
    # What is ignored stays so: that is what nohup and a shell's background jobs ask for.
    heard = [number for number in _ENDINGS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in heard:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in heard:
            loop.remove_signal_handler(number)


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
