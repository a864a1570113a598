"""Batched acknowledgements settle exactly the messages that were acknowledged or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from aio_pika.tools import CallbackCollection
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.brokers.rabbitmq_connection import (
    RabbitConfig,
    RabbitConnection,
    RabbitConsumerConnection,
    safe_cause,
    translate,
)


class Broker:
    """The broker's side of a channel: applies the frames that it receives."""

    def __init__(self, tags: range) -> None:
        self.open = set(tags)
        self.outcome: dict[int, str] = {}
        self.frames = 0
        self.closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_consumer_cancel_callbacks: set[Callable[..., Any]] = set()

    async def basic_ack(self, tag: int, multiple: bool = False, wait: bool = True) -> None:
        await self._settle([each for each in sorted(self.open) if each <= tag] if multiple else [tag], "acknowledged")

    async def basic_nack(self, tag: int, requeue: bool = True, wait: bool = True) -> None:
        await self._settle([tag], "requeued" if requeue else "dropped")

    async def _settle(self, tags: list[int], outcome: str) -> None:
        self.frames += 1
        for tag in tags:
            # A broker closes the channel on an unknown tag.
            self.open.remove(tag)
            self.outcome[tag] = outcome
        # Other tasks run while a frame is in flight.
        await asyncio.sleep(0)


class Connection:
    def __init__(self) -> None:
        self.close_callbacks: CallbackCollection[Any, Any] = CallbackCollection(self)

    async def close(self) -> None: ...


OUTCOMES = ("acknowledged", "requeued", "dropped")


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(1, 6), st.sampled_from(OUTCOMES), st.integers(0, 4)), max_size=12),
)
# A refusal while an earlier one is in flight, followed by an acknowledgement of a later message.
@example(steps=[(1, "acknowledged", 0), (3, "requeued", 0), (4, "acknowledged", 1), (2, "requeued", 0)])
@example(steps=[(1, "acknowledged", 0), (3, "requeued", 0), (4, "acknowledged", 3), (2, "requeued", 0)])
@example(steps=[(1, "acknowledged", 0), (3, "requeued", 0), (4, "acknowledged", 4), (2, "requeued", 0)])
def test_every_message_is_settled_as_requested(steps: list[tuple[int, str, int]]) -> None:
    expected: dict[int, str] = {}

    async def run() -> Broker:
        broker = Broker(range(1, 7))
        link = RabbitConsumerConnection(RabbitConfig(), Connection())  # type: ignore[arg-type]
        link.begin(broker)  # type: ignore[arg-type]
        link.in_flight.update(dict.fromkeys(broker.open))
        for tag, outcome, rounds in steps:
            if tag in expected:
                continue
            expected[tag] = outcome
            if outcome == "acknowledged":
                link.ack(tag)
            else:
                link.nack(tag, requeue=outcome == "requeued")
            for _ in range(rounds):
                await asyncio.sleep(0)
        await link.close()
        return broker

    broker = asyncio.run(run())
    assert broker.outcome == expected
    assert broker.open == set(range(1, 7)) - set(expected)


async def test_many_acknowledgements_are_sent_as_one_frame() -> None:
    broker = Broker(range(1, 1001))
    link = RabbitConsumerConnection(RabbitConfig(), Connection())  # type: ignore[arg-type]
    link.begin(broker)  # type: ignore[arg-type]
    link.in_flight.update(dict.fromkeys(range(1, 1001)))
    for tag in range(1, 1000):
        link.ack(tag)
    await link.close()
    assert (broker.frames, broker.open) == (1, {1000})


async def test_acknowledgements_are_batched_for_a_short_time() -> None:
    """They are sent at once for a share of the messages in flight, otherwise after a short delay."""
    broker = Broker(range(1, 101))
    link = RabbitConsumerConnection(RabbitConfig(), Connection())  # type: ignore[arg-type]
    link.begin(broker)  # type: ignore[arg-type]
    link.in_flight.update(dict.fromkeys(sorted(broker.open)))
    for tag in range(1, 101):
        link.ack(tag)
        await asyncio.sleep(0)
    while broker.open:  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.001)
    assert broker.frames < 20
    broker.open.update(range(101, 201))
    link.in_flight.update(dict.fromkeys(range(101, 201)))
    link.ack(101)
    async with asyncio.timeout(10):
        while 101 in broker.open:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await link.close()


SECRET = "pa:ss/w@rd %5"
URL = f"amqp://shop:{quote(SECRET, safe='')}@rabbit:5672/"


@pytest.mark.parametrize(
    "settings", [{"url": URL}, {"host": "rabbit", "user": "shop", "password": SECRET}], ids=["url", "parts"]
)
async def test_passwords_in_errors_of_the_library_are_redacted(settings: dict[str, Any]) -> None:
    connection = RabbitConfig.model_validate(settings)
    secrets = (SECRET, quote(SECRET, safe=""))
    for text in (*secrets, f"cannot reach {URL}", f"PLAIN \0shop\0{SECRET}"):
        error = ConnectionError(text)
        translated = translate(error, connection)
        assert translated.__cause__ is None
        assert safe_cause(error, connection) is None
        link = RabbitConnection(connection, Connection())  # type: ignore[arg-type]
        link.fail(error)
        for shown in (str(translated), repr(translated), link.reason):
            assert not any(each in shown for each in secrets)
    harmless = ConnectionError("no route to host")
    assert safe_cause(harmless, connection) is harmless
    assert "no route to host" in str(translate(harmless, connection))
