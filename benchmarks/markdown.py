"""What the generated pages share: tables, and the sentence that says on what a run was measured."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.model import Results


def lines(rows: Sequence[Sequence[str]]) -> str:
    """A table; its second row is the rule under the heads."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def about(run: Results, names: Sequence[str], how_to_read: str) -> str:
    """When and on what it was measured, how far the machine wandered, and how to read the tables."""
    known = {**run.machine, **run.settings}
    facts = "; ".join(f"{name} {known[name]}" for name in names if name in known)
    loops = [calibration.loop_ms for calibration in run.calibrations] or [0.0]
    trips = [calibration.round_trip_us for calibration in run.calibrations] or [0.0]
    return (
        f"Run of {run.began_at}: {facts}. Calibration over the run: loop {min(loops):.1f} to {max(loops):.1f} ms, "
        f"round trip {min(trips):.0f} to {max(trips):.0f} µs. Medians of the rounds; {how_to_read}."
    )
