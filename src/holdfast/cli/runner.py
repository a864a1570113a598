"""Runs a command's coroutine, on uvloop where it is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from holdfast.extras import loop_factory

R = TypeVar("R")


def run_async(work: Coroutine[Any, Any, R]) -> R:
    """The coroutine's result; Ctrl-C cancels it and comes out as `KeyboardInterrupt`."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)
