"""A worker for tests of an app in memory: it runs what is due, and stops."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from holdfast.app import Holdfast
from holdfast.errors import UsageError
from holdfast.testing.clock import ManualClock
from holdfast.testing.inline import drain


class InMemoryWorker:
    """What the fixture `holdfast_worker` gives. Delivers no webhooks and publishes no events."""

    def __init__(self, app: Holdfast, clock: ManualClock) -> None:
        """Raises `UsageError` for an app that is not in memory."""
        if not app.settings.in_memory:
            raise UsageError(
                f"the app is on {app.settings.url.partition('://')[0]}://…, not in memory; return it from the fixture "
                "holdfast_base_app and use holdfast_app, which moves it"
            )
        self.app = app
        self.clock = clock

    async def drain(self, queues: Sequence[str] | None = None) -> int:
        """Run what is due, and what becomes due by it, until nothing is; returns how many runs that took."""
        return await drain(self.app, queues)

    async def advance(self, by: timedelta | float, queues: Sequence[str] | None = None) -> int:
        """Let time pass, then drain."""
        self.clock.advance(by)
        return await self.drain(queues)

    def drain_sync(self, queues: Sequence[str] | None = None) -> int:
        """`drain` for tests without an event loop."""
        return self._call(lambda: self.drain(queues), "drain")

    def advance_sync(self, by: timedelta | float, queues: Sequence[str] | None = None) -> int:
        """`advance` for tests without an event loop."""
        return self._call(lambda: self.advance(by, queues), "advance")

    def _call(self, make: Any, name: str) -> int:
        return int(self.app.door.call(f"{name}_sync", make, f"await holdfast_worker.{name}(…)"))
