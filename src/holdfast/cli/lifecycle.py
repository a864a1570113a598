"""Event loop and signals of commands.

`run_async` runs a command's coroutine, on uvloop if it is installed. While a long-running command works, the first
SIGTERM, SIGINT or SIGHUP makes it finish, the second makes it stop now.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from holdfast.extras import loop_factory

#: Default address for metrics.
LOOPBACK: Final = "127.0.0.1"

R = TypeVar("R")


def run_async(work: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine and return its result. Ctrl-C cancels it and raises `KeyboardInterrupt`."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)


_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on every SIGTERM, SIGINT and SIGHUP while the block runs."""
    loop = asyncio.get_running_loop()
    # Ignored signals stay ignored: nohup and background jobs of a shell rely on that.
    handled = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in handled:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


@contextmanager
def run_until_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Like `on_signals`, for a command that runs until a signal stops it; also calls `freeze_gc`."""
    freeze_gc()
    with on_signals(stop):
        yield


def freeze_gc() -> None:
    """Exclude loaded code from garbage collection.

    Code is most of a process's objects and is never freed, yet each full collection pauses about 40 ms to scan it.
    """
    gc.freeze()
