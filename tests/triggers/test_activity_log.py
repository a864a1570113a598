"""What a trigger logs at INFO: each step of the first message, and summaries of the others."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import Any

import pytest

from holdfast.brokers.port import RawMessage
from holdfast.ledger.port.messages import ExecutionStatus
from holdfast.triggers.activity_log import Activity
from holdfast.triggers.config import QueueTriggerConfig
from holdfast.triggers.state import InFlightMessage, TriggerCounters
from tests.triggers.rig import Recorder, Rig, until

LOGGER = "holdfast.triggers"
START = datetime(2027, 1, 1, tzinfo=UTC)


def stages(caplog: pytest.LogCaptureFixture, message_id: str) -> list[str]:
    records = [record for record in caplog.records if getattr(record, "message_id", "") == message_id]
    return [getattr(record, "stage", "") for record in records if record.levelno == logging.INFO]


def summaries(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if "received" in vars(record) or "submitted" in vars(record)]


async def test_the_first_message_is_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(Recorder())
    with caplog.at_level(logging.INFO, LOGGER):
        async with rig.trigger:
            message_id = rig.write(1, event_name="order.placed")
            await rig.wait_handled(1)
            assert stages(caplog, message_id) == ["received", "handed_over", "ack"]
            text = caplog.text
    assert f"message {message_id}: submitted, run run-1" in text
    assert f"message {message_id}: acknowledged" in text


async def test_many_messages_are_summarized(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(Recorder(lambda context: _fail_at(context, 7)), concurrency=4, max_retries=0)
    for number in range(500):
        rig.write(number)
    rig.write(b"not JSON")
    rig.write(1, dedup_key="same")
    rig.write(1, dedup_key="same")
    with caplog.at_level(logging.INFO, LOGGER):
        await rig.run(503)
    info_records = [record for record in caplog.records if record.levelno == logging.INFO]
    # Received, submitted, acknowledged, the summary, the stop; a slow machine may log a second interval.
    assert len(info_records) < 20
    keys = ("received", "submitted", "acknowledged", "duplicate", "unparsable", "failed", "dead_letters")
    total = {key: sum(each.get(key, 0) for each in summaries(caplog)) for key in keys}
    assert total == dict(zip(keys, (503, 500, 501, 1, 1, 1, 2), strict=True))


def _fail_at(context: Any, number: int) -> str:
    if context["message"] == number:
        raise RuntimeError("not this one")
    return "run"


async def test_each_interval_with_activity_has_a_summary(caplog: pytest.LogCaptureFixture) -> None:
    config = QueueTriggerConfig(queue_name="orders", consumer_group="shop", name="big")
    counts = TriggerCounters("orders")
    activity = Activity(config, counts, interval_s=0.01)
    with caplog.at_level(logging.INFO, LOGGER):
        running = asyncio.create_task(activity.run())
        first, second = (InFlightMessage(RawMessage(name, b"1", {}, START, {})) for name in "ab")
        activity.receive(first)
        activity.receive(second)
        assert (first.level, second.level) == (logging.INFO, logging.DEBUG)
        counts.consumed[ExecutionStatus.SUCCESS] += 2
        counts.acknowledged += 2
        await until(lambda: caplog.messages, "a summary")
        third = InFlightMessage(RawMessage("c", b"1", {}, START, {}))
        activity.receive(third)
        assert third.level == logging.INFO
        await until(lambda: len(caplog.messages) == 2, "another summary")
        # Nothing was received in this interval.
        counts.consumed[ExecutionStatus.SUCCESS] += 1
        activity.end()
        await until(lambda: len(caplog.messages) == 3, "a third summary")
        running.cancel()
        await asyncio.wait({running})
    assert caplog.messages == [
        "trigger big: 2 received, 2 submitted, 2 acknowledged",
        "trigger big: 1 received",
        "trigger big: 1 submitted",
    ]
