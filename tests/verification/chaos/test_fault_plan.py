"""A fault plan depends only on its seed, and covers every kind of fault."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from holdfast.verification.chaos.faults import pairs_of, plan
from holdfast.verification.chaos.parts import Fault, FaultKind, Program, group_of

_PROCESS = frozenset({FaultKind.KILL, FaultKind.STOP, FaultKind.RESTART})
_KINDS = _PROCESS | {FaultKind.CUT, FaultKind.SLOW, FaultKind.STALL}
PARTS = {
    "worker-1": _KINDS,
    "worker-2": _KINDS,
    "worker-10": _KINDS,
    "upkeep-1": _KINDS,
    "server-1": _KINDS | {FaultKind.LOSE_REPLY},
    "redis": _KINDS | {FaultKind.LOSE_REPLY, FaultKind.FILL},
    "postgres": _KINDS | {FaultKind.LOSE_REPLY, FaultKind.FILL},
}


def test_the_same_seed_gives_the_same_plan_in_any_order_of_parts() -> None:
    first = plan(7, 90, PARTS)
    assert first == plan(7, 90, dict(reversed(PARTS.items())))
    assert first != plan(8, 90, PARTS)


def test_the_same_seed_gives_the_same_plan_in_another_process() -> None:
    code = (
        "from holdfast.verification.chaos.faults import plan; from holdfast.verification.chaos.parts import FaultKind;"
        "print(plan(3, 40, {'worker-1': frozenset(FaultKind), 'redis': frozenset(FaultKind)}))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": salt}, capture_output=True, text=True, check=True
        ).stdout
        for salt in ("1", "2")
    }
    assert len(outputs) == 1


def test_the_plan_of_a_seed_is_pinned() -> None:
    """A report names a seed, which must give the same plan in later releases. This includes weights and durations."""
    assert plan(1, 3, PARTS) == PINNED
    long = msgspec.json.encode(plan(1, 200, PARTS))
    assert hashlib.sha256(long).hexdigest()[:16] == PINNED_LONG


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_first_covers_every_kind_for_every_group(seed: int) -> None:
    pairs = pairs_of(PARTS)
    assert len(pairs) == 5 * 6 + 3 + 2
    faults = plan(seed, len(pairs), PARTS)
    assert {(fault.kind, group_of(fault.target)) for fault in faults} == pairs
    assert all(fault.kind in PARTS[fault.target] for fault in plan(seed, 300, PARTS))


def test_faults_with_more_weight_happen_more_often() -> None:
    counts = Counter((fault.kind, group_of(fault.target)) for fault in plan(1, 1_000, PARTS))
    assert counts[FaultKind.KILL, "worker"] > 3 * counts[FaultKind.CUT, "worker"]
    assert counts[FaultKind.STOP, "worker"] > 3 * counts[FaultKind.RESTART, "upkeep"]
    assert counts[FaultKind.KILL, "redis"] > 2 * counts[FaultKind.RESTART, "redis"]
    assert min(counts.values()) >= 5


@pytest.mark.parametrize("faults", [8, 20, 40, 100])
def test_fail_overs_are_frequent_where_they_are_possible(faults: int) -> None:
    parts = PARTS | {
        "redis": _PROCESS | {FaultKind.FAIL_OVER, FaultKind.HAND_OVER},
        "redis-2": _PROCESS,
        "sentinel-1": _PROCESS,
    }
    for seed in range(10):
        planned = plan(seed, faults, parts)
        assert len(planned) == faults
        counts = Counter(fault.kind for fault in planned)
        assert counts[FaultKind.FAIL_OVER] + counts[FaultKind.HAND_OVER] >= faults // 8
        if faults >= 16:
            assert min(counts[FaultKind.FAIL_OVER], counts[FaultKind.HAND_OVER]) >= 1
    covered = {(fault.kind, group_of(fault.target)) for fault in plan(1, 60, parts)}
    assert covered == pairs_of(parts)


def test_all_parts_of_a_group_get_faults() -> None:
    counts = Counter(fault.target for fault in plan(1, 300, PARTS))
    assert counts.keys() == PARTS.keys()


def test_faults_are_ordered_and_spread_and_some_are_simultaneous() -> None:
    faults = plan(2, 200, PARTS)
    moments = [fault.at for fault in faults]
    assert [fault.number for fault in faults] == list(range(1, 201))
    assert moments == sorted(moments)
    assert moments[0] > 0
    assert moments[-1] < 1
    simultaneous = len(moments) - len(set(moments))
    assert 25 <= simultaneous <= 75
    # There is no long interval without a fault.
    assert max(next_moment - moment for moment, next_moment in itertools.pairwise(moments)) < 0.02


def test_some_stops_outlast_a_lease_and_some_do_not() -> None:
    stops = [fault.seconds for fault in plan(1, 400, PARTS) if fault.kind is FaultKind.STOP]
    assert min(stops) < 1
    assert 3 < max(stops) <= 6
    assert all(fault.seconds == 0 for fault in plan(1, 100, PARTS) if fault.kind in (FaultKind.KILL, FaultKind.CUT))


def test_a_plan_without_possible_faults_is_empty() -> None:
    assert plan(1, 10, {"worker-1": frozenset()}) == []
    assert plan(1, 0, PARTS) == []


PINNED_LONG = "e5f985e4e850d871"
PINNED = [
    Fault(number=1, at=0.071746, kind=FaultKind.LOSE_REPLY, target="server-1", seconds=1.623),
    Fault(number=2, at=0.50869, kind=FaultKind.SLOW, target="server-1", seconds=2.953),
    Fault(number=3, at=0.827562, kind=FaultKind.CUT, target="worker-2", seconds=0.0),
]


def test_a_process_for_lost_jobs_does_not_make_its_worker_ready(tmp_path: Path) -> None:
    program, log = Program("worker-1", ["worker"], tmp_path, {}), tmp_path / "worker-1.log"
    log.write_text("worker isolated@vm-3142-6aff2de24cff5add started on redis://…\n")
    assert not program._answers()
    log.write_text(log.read_text() + "worker vm-3283-6aff2de9bf9c05a5 started on redis://…\n")
    assert program._answers()


def test_failed_attempts_are_not_defects_and_other_tracebacks_are(tmp_path: Path) -> None:
    stack = "Traceback (most recent call last):\n  File …\nValueError: no"
    records = [
        {"logger": "holdfast.worker", "message": "job j failed for good", "error_type": "ValueError", "stack": stack},
        {"logger": "holdfast.worker", "message": "the loop ended", "stack": stack},
        {"logger": "shop", "message": "odd", "error_type": "ValueError", "stack": stack},
    ]
    lines = [msgspec.json.encode(record).decode() for record in records]
    (tmp_path / "worker-1.log").write_text("\n".join([*lines, "Traceback (most recent call last):", "[]"]))
    program = Program("worker-1", ["worker"], tmp_path, {})
    assert program.tracebacks() == [
        "the loop ended: ValueError: no",
        "odd: ValueError: no",
        "Traceback (most recent call last):",
    ]
