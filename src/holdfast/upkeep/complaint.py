"""Says that something does not work: when it begins, and then once a minute, not with every try."""

from __future__ import annotations

import logging
import time
from typing import Final

_AGAIN_S: Final = 60.0


class Complaint:
    """About one thing."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said_at: float | None = None

    def say(self, level: int, message: str, *arguments: object, cause: Exception | None = None) -> None:
        """Say so, unless it was said a moment ago."""
        now = time.monotonic()
        if self._said_at is None or now - self._said_at >= _AGAIN_S:
            self._said_at = now
            self._log.log(level, message, *arguments, exc_info=cause)

    def over(self) -> bool:
        """It works; whether there was anything to complain of."""
        complained, self._said_at = self._said_at is not None, None
        return complained
