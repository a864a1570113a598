"""Hundreds of random histories: the reconciler restores every lost job, and none whose final event is unread."""

from __future__ import annotations

import os
from typing import Any, Final

import pytest

from holdfast.upkeep import reconciler as module
from holdfast.upkeep.reconciler import Reconciler
from tests.upkeep.reconciler_rig import SimulatedEngine, SimulatedLedger, Simulation

HISTORIES: Final = 300
STEPS: Final = 60
#: Another seed: HOLDFAST_TEST_SEED=7 pytest …
SEED: Final = int(os.environ.get("HOLDFAST_TEST_SEED", "20261115"))


class NaiveReconciler(Reconciler):
    """A reconciler that neither waits for the ledger nor reads the jobs a second time."""

    async def _wait_reached(self, *_: Any) -> bool:
        return True

    async def _still_lost(self, suspects: Any) -> Any:
        return set(suspects)


class HastyReconciler(Reconciler):
    """A reconciler that neither waits for the ledger to reach the snapshot nor reads the feed after it."""

    async def _wait_reached(self, *_: Any) -> bool:
        return True

    async def _read_rest(self, queue: str, position: Any) -> Any:
        found = await super()._read_rest(queue, position)
        return found and (found[0], set())


def make_reconciler(simulation: Simulation, reconciler_class: type[Reconciler] = Reconciler) -> Reconciler:
    return reconciler_class(
        SimulatedEngine(simulation),  # type: ignore[arg-type]
        SimulatedLedger(simulation),  # type: ignore[arg-type]
        monotonic=lambda: simulation.now_ms / 1000,
    )


async def run_history(seed: int, reconciler_class: type[Reconciler] = Reconciler) -> Simulation:
    """Run one history: random steps with a reconciler pass now and then."""
    simulation = Simulation(seed)
    for _ in range(5):
        for _ in range(STEPS):
            simulation.step()
        await make_reconciler(simulation, reconciler_class).reconcile()
    return simulation


async def test_every_lost_job_is_restored_once_and_none_whose_final_event_is_unread() -> None:
    print(f"seed {SEED}")
    restores = lost = 0
    for seed in range(SEED, SEED + HISTORIES):
        simulation = await run_history(seed)
        assert simulation.wrong == [], f"seed {seed}"
        restores += simulation.restores
        if simulation.random.random() < 0.5:
            simulation.wipe()
        simulation.settle_down()
        missing, restored, passes = simulation.lost(), 0, 0
        while simulation.lost():
            restored += (await make_reconciler(simulation).reconcile()).restored
            passes += 1
            # The simulated projector is slow and snapshots expire: some pages wait for the next pass.
            assert passes < 20, f"seed {seed}: {simulation.lost()} are still lost"
        assert restored == len(missing), f"seed {seed}"
        simulation.settle_down()
        # A second pass finds nothing.
        again = await make_reconciler(simulation).reconcile()
        assert (again.lost, again.restored, again.skipped) == (0, 0, {}), f"seed {seed}"
        assert simulation.wrong == [], f"seed {seed}"
        lost += len(missing)
    # The histories contain enough losses.
    assert restores > HISTORIES
    assert lost > HISTORIES


@pytest.mark.parametrize("reconciler_class", [NaiveReconciler, HastyReconciler])
async def test_without_the_wait_the_same_histories_fail(reconciler_class: type[Reconciler]) -> None:
    """Shows that the check can fail."""
    wrong = 0
    for seed in range(SEED, SEED + HISTORIES // 6):
        wrong += len((await run_history(seed, reconciler_class)).wrong)
    assert wrong > 0


async def test_snapshots_that_took_too_long_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(SEED)
    while not simulation.states:
        simulation.create()
        simulation.project()
    simulation.wipe()
    simulation.settle_down()
    monkeypatch.setattr(module, "_SNAPSHOT_SHARE", -1.0)
    report = await make_reconciler(simulation).reconcile()
    assert report.restored == 0
    assert set(report.skipped) <= {module.TOO_OLD, module.LEDGER_BEHIND}
    assert report.skipped
