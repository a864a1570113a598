"""Long-running commands: objects loaded before work starts are frozen for the garbage collector."""

from __future__ import annotations

import gc

from holdfast.cli.lifecycle import run_until_signal


async def test_loaded_objects_are_frozen() -> None:
    gc.unfreeze()
    with run_until_signal(lambda: None):
        assert gc.get_freeze_count() > 1_000
