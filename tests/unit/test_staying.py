"""Commands that stay: the garbage collector leaves alone what was loaded before the work began."""

from __future__ import annotations

import gc

from holdfast.cli.staying import staying


async def test_what_is_loaded_is_not_looked_at_again() -> None:
    gc.unfreeze()
    with staying(lambda: None):
        assert gc.get_freeze_count() > 1_000
