"""SIGTERM, SIGINT and SIGHUP while a long-running command works: the first asks it to finish, the second to hurry."""

from __future__ import annotations

import asyncio
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
