"""Threads for functions that are not `async`.

Daemon threads of our own rather than an executor: the standard one joins its threads when the
interpreter ends, so that one function that never returns would keep a drained worker alive for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[], None]


class Threads:
    """As many threads as there is work at the same moment; idle ones are used again. The caller bounds the work."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._count = 0

    def start(self, work: Work) -> None:
        """Run `work`, which must not raise, in a thread at once."""
        self._work.put(work)
        with self._lock:
            if self._idle:
                self._idle -= 1
                return
            self._count += 1
            number = self._count
        threading.Thread(target=self._serve, name=f"{self._name}-{number}", daemon=True).start()

    def close(self) -> None:
        """Let idle threads end; busy ones end after their work."""
        for _ in range(self._count):
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            # Not kept while waiting: it holds the job's arguments.
            del work
            with self._lock:
                self._idle += 1
