"""Acknowledgements that are sent together mean exactly the messages that were settled."""

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
    """A channel's end at the broker: what it would make of the frames."""

    def __init__(self, tags: range) -> None:
        self.open = set(tags)
        self.fate: dict[int, str] = {}
        self.frames = 0
        self.closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_consumer_cancel_callbacks: set[Callable[..., Any]] = set()

    async def basic_ack(self, tag: int, multiple: bool = False, wait: bool = True) -> None:
        await self._settle([each for each in sorted(self.open) if each <= tag] if multiple else [tag], "acknowledged")

    async def basic_nack(self, tag: int, requeue: bool = True, wait: bool = True) -> None:
        await self._settle([tag], "requeued" if requeue else "dropped")

    async def _settle(self, tags: list[int], fate: str) -> None:
        self.frames += 1
        for tag in tags:
            # A broker closes the channel for a tag that it does not know.
            self.open.remove(tag)
            self.fate[tag] = fate
        # Others act while a frame is on its way.
        await asyncio.sleep(0)


class Connection:
    def __init__(self) -> None:
        self.close_callbacks: CallbackCollection[Any, Any] = CallbackCollection(self)

    async def close(self) -> None: ...


FATES = ("acknowledged", "requeued", "dropped")


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(1, 6), st.sampled_from(FATES), st.integers(0, 4)), max_size=12),
)
# Refused while an earlier refusal is on its way, with an acknowledgement of a later message behind it.
@example(steps=[(1, "acknowledged", 0), (3, "requeued", 0), (4, "acknowledged", 1), (2, "requeued", 0)])
@example(steps=[(1, "acknowledged", 0), (3, "requeued", 0), (4, "acknowledged", 3), (2, "requeued", 0)])
@example(steps=[(1, "acknowledged", 0), (3, "requeued", 0), (4, "acknowledged", 4), (2, "requeued", 0)])
def test_every_message_gets_what_was_said_of_it(steps: list[tuple[int, str, int]]) -> None:
    said: dict[int, str] = {}

    async def run() -> Broker:
        broker = Broker(range(1, 7))
        link = RabbitConsumerConnection(RabbitConfig(), Connection())  # type: ignore[arg-type]
        link.begin(broker)  # type: ignore[arg-type]
        link.in_flight.update(dict.fromkeys(broker.open))
        for tag, fate, turns in steps:
            if tag in said:
                continue
            said[tag] = fate
            if fate == "acknowledged":
                link.ack(tag)
            else:
                link.nack(tag, requeue=fate == "requeued")
            for _ in range(turns):
                await asyncio.sleep(0)
        await link.close()
        return broker

    broker = asyncio.run(run())
    assert broker.fate == said
    assert broker.open == set(range(1, 7)) - set(said)


async def test_many_acknowledgements_are_one_frame() -> None:
    broker = Broker(range(1, 1001))
    link = RabbitConsumerConnection(RabbitConfig(), Connection())  # type: ignore[arg-type]
    link.begin(broker)  # type: ignore[arg-type]
    link.in_flight.update(dict.fromkeys(range(1, 1001)))
    for tag in range(1, 1000):
        link.ack(tag)
    await link.close()
    assert (broker.frames, broker.open) == (1, {1000})


async def test_acknowledgements_wait_for_each_other_but_not_for_long() -> None:
    """At once for a share of what is in hand, which is all of it if there is no other; the rest after a moment."""
    broker = Broker(range(1, 101))
    link = RabbitConsumerConnection(RabbitConfig(), Connection())  # type: ignore[arg-type]
    link.begin(broker)  # type: ignore[arg-type]
    link.in_flight.update(dict.fromkeys(sorted(broker.open)))
    for tag in range(1, 101):
        link.ack(tag)
        await asyncio.sleep(0)
    while broker.open:  # noqa: ASYNC110 - it has no event for this
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
async def test_what_a_library_says_of_a_password_is_blotted_out(settings: dict[str, Any]) -> None:
    connection = RabbitConfig.model_validate(settings)
    hidden = (SECRET, quote(SECRET, safe=""))
    for said in (*hidden, f"cannot reach {URL}", f"PLAIN \0shop\0{SECRET}"):
        error = ConnectionError(said)
        told = translate(error, connection)
        assert told.__cause__ is None
        assert safe_cause(error, connection) is None
        link = RabbitConnection(connection, Connection())  # type: ignore[arg-type]
        link.fail(error)
        for text in (str(told), repr(told), link.reason):
            assert not any(each in text for each in hidden)
    harmless = ConnectionError("no route to host")
    assert safe_cause(harmless, connection) is harmless
    assert "no route to host" in str(translate(harmless, connection))
