"""A projector's waits on a store whose clock is coarse."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import AsyncMock, Mock

import pytest

from holdfast.engine.port import Engine
from holdfast.ledger.port.ledger import FeedPosition, Ledger
from holdfast.upkeep.feed_cursor import FeedCursor
from holdfast.upkeep.projector import Projector


@pytest.mark.parametrize("busy", [True, False])
async def test_a_busy_feed_does_not_wait_for_an_idle_one(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Redis checks timeouts ten times a second: even the shortest wait takes up to 100 ms on an idle server.
    engine = AsyncMock(spec=Engine)
    engine.wait_feed.return_value = []
    projector = Projector(engine, Mock(spec=Ledger, projection=Mock()), ["busy", "idle"])
    monkeypatch.setattr(projector, "_serve", AsyncMock())
    monkeypatch.setattr(projector, "_measure", Mock())
    projector._round_at = time.monotonic() + 60
    for queue in ("busy", "idle"):
        projector._cursors[queue] = FeedCursor(queue, FeedPosition("1-0", "n"), "")
    if busy:
        projector._cursors["busy"].ahead = asyncio.create_task(asyncio.sleep(0))  # type: ignore[arg-type]
    await projector._run_once()
    ((positions, wait_ms), _) = engine.wait_feed.await_args
    assert "idle" in positions
    assert (wait_ms == 0) is busy
