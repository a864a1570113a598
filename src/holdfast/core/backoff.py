"""How long to wait before trying a store again: longer each time, never all at the same moment."""

from __future__ import annotations

from random import Random
from typing import Final

_BASE_S: Final = 0.05
_CAP_S: Final = 2.0
_MAX_EXPONENT: Final = 16


class Backoff:
    """Doubles from 50 ms to 2 s, each wait spread by ± 50 %, so that many workers do not return in step."""

    def __init__(self, random: Random | None = None, *, base_s: float = _BASE_S, cap_s: float = _CAP_S) -> None:
        self._random = random or Random()
        self._base_s = base_s
        self._cap_s = cap_s
        self.failures = 0

    def next_s(self) -> float:
        """One more failure: wait this long."""
        grown = min(self._cap_s, self._base_s * 2.0 ** min(self.failures, _MAX_EXPONENT))
        self.failures += 1
        return grown * self._random.uniform(0.5, 1.5)

    def reset(self) -> None:
        """It worked."""
        self.failures = 0
