"""The ledger refuses batches that were read in an earlier epoch of the engine."""

from __future__ import annotations

import pytest

from holdfast.core.job import JobKey
from holdfast.core.states import State
from holdfast.ledger.port.ledger import FeedPosition, Ledger, PositionMoved, RecordedState
from tests.ledger.projection_rig import LEASE_MS, QUEUE, Feed, FeedWriter


async def test_a_batch_of_an_earlier_epoch_is_refused(ledger: Ledger) -> None:
    feed, writer = Feed(), FeedWriter(ledger)
    await writer.write(feed.entry(*feed.life("j1")))
    assert await writer.projection.engine_epoch(QUEUE) == ""
    assert await writer.projection.begin_epoch(QUEUE, "e1", "") == writer.at
    late = feed.entry(*feed.life("j2"))
    for epoch in ("", "e0"):
        with pytest.raises(PositionMoved):
            await writer.projection.project(QUEUE, "me", LEASE_MS, writer.at, [late], epoch=epoch)
    assert await ledger.recovery.recorded([JobKey("default", QUEUE, "j2")]) == {}
    done = await writer.projection.project(QUEUE, "me", LEASE_MS, writer.at, [late], epoch="e1")
    assert await writer.projection.position(QUEUE) == done.at


async def test_an_epoch_begins_once(ledger: Ledger) -> None:
    """A verification that was slow does not undo a later one."""
    assert ledger.projection is not None
    projection = ledger.projection
    assert await projection.begin_epoch(QUEUE, "e1", "") == FeedPosition()
    assert await projection.begin_epoch(QUEUE, "e2", "e1") == FeedPosition()
    assert await projection.begin_epoch(QUEUE, "e1", "") is None
    assert await projection.engine_epoch(QUEUE) == "e2"
    assert await projection.begin_epoch(QUEUE, "e2", "e2") == FeedPosition()
    # Nothing of the queue was read yet.
    assert await ledger.recovery.queues() == []


async def test_recorded_jobs_have_their_state_and_result(ledger: Ledger) -> None:
    feed, writer = Feed(), FeedWriter(ledger)
    failed = feed.failed("j2", State.RETRYING, retries=1)
    await writer.write(
        feed.entry(*feed.life("j1")),
        feed.entry(feed.created("j2"), feed.claimed("j2"), failed),
        feed.entry(feed.created("j3")),
    )
    keys = {number: JobKey("default", QUEUE, f"j{number}") for number in range(1, 5)}
    assert await ledger.recovery.recorded(list(keys.values())) == {
        keys[1]: RecordedState(State.SUCCEEDED, 1, 0, "3"),
        keys[2]: RecordedState(State.RETRYING, 1, 1),
        keys[3]: RecordedState(State.QUEUED, 0, 0),
    }
