"""Everything that a long run found."""

from __future__ import annotations

import msgspec

from benchmarks.endurance.verdict import Verdict


class Endurance(msgspec.Struct):
    """One run: series by name, and what is said of them."""

    began_at: str
    machine: dict[str, str]
    minutes: float
    top_per_s: float
    wanted_per_s: float
    expire_s: float
    every_s: float
    submitted_per_s: float = 0.0
    #: Kind of job → how many.
    submitted: dict[str, int] = {}
    #: Seconds since the beginning, one for each look.
    at_s: list[float] = []
    series: dict[str, list[float]] = {}
    verdicts: dict[str, Verdict] = {}
    failures: list[str] = []

    def add(self, at_s: float, values: dict[str, float]) -> None:
        """One more look; all of them see the same things."""
        self.at_s.append(round(at_s, 2))
        for name, value in values.items():
            self.series.setdefault(name, []).append(round(value, 3))

    def of(self, name: str) -> list[tuple[float, float]]:
        """One series with its instants."""
        return list(zip(self.at_s, self.series[name], strict=True))
