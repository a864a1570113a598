"""Commands that stay: the garbage collector leaves alone what was loaded before the work began."""

from __future__ import annotations

import gc

from holdfast.cli.lifecycle import run_until_signal


async def test_what_is_loaded_is_not_looked_at_again() -> None:
    gc.unfreeze()
    with run_until_signal(lambda: None):
        assert gc.get_freeze_count() > 1_000
