"""RabbitMQ, by aio-pika: quorum queues, publisher confirms, prefetch by `basic.qos`.

Consumers of a queue share its messages, so a consumer group is the queue itself; its name shows in RabbitMQ's own
tools. Order per key is kept within one consumer; across several, by `single_active_consumer`.

A message is ours as long as the channel lives that it came on. Acknowledgements are sent together, many with one
frame; one that is lost with its channel means that the message comes once more.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, Final

from aiormq import Channel
from aiormq import exceptions as amqp
from aiormq.abc import DeliveredMessage

from holdfast.aio import is_own_cancellation
from holdfast.brokers.port import OutgoingMessage, Publisher, QueueAdapter, RawMessage
from holdfast.brokers.rabbitmq_connection import (
    CONNECTION_ERRORS,
    RabbitConfig,
    RabbitConnection,
    RabbitConsumerConnection,
    safe_cause,
    translate,
)
from holdfast.brokers.rabbitmq_messages import dead_letter, publish, raw_message
from holdfast.core.retry import Backoff
from holdfast.errors import BrokerRefused, BrokerUnavailable

_log: Final = logging.getLogger("holdfast.brokers.rabbitmq")

#: The protocol's largest.
_MAX_PREFETCH: Final = 65_535
_HEALTH_S: Final = 3.0
#: A link that lived for so long was a good one: the next one is tried for without a long wait.
_GOOD_LINK_S: Final = 5.0


class RabbitAdapter(QueueAdapter):
    """A consumer of one queue."""

    def __init__(
        self,
        connection: RabbitConfig,
        queue_name: str,
        consumer_group: str,
        *,
        prefetch: int = 100,
        dlq_name: str | None = None,
    ) -> None:
        self.queue_name = queue_name
        self.consumer_group = consumer_group
        self._settings = connection
        self._prefetch = min(prefetch, _MAX_PREFETCH)
        self._dlq_name = dlq_name or f"{queue_name}.dlq"
        self._link: RabbitConsumerConnection | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._arrived: deque[tuple[RabbitConsumerConnection, RawMessage]] = deque()
        #: Which link each message that was handed out came on.
        self._origin: dict[RawMessage, tuple[RabbitConsumerConnection, int]] = {}
        self._news = asyncio.Event()
        #: One change of the consumer at a time.
        self._changing = asyncio.Lock()
        self._wanted = False
        self._paused = False
        self._closed = False

    async def connect(self) -> None:
        link = await self._open()
        if self._closed:
            await link.close()
            raise BrokerUnavailable("closed while it was connecting")
        self._link = link
        self._keeper = asyncio.create_task(self._keep(), name=f"rabbitmq-{self.queue_name}")

    async def consume(self) -> AsyncIterator[RawMessage]:
        if self._link is None and not self._closed:
            raise BrokerUnavailable("not connected yet: call connect() first")
        self._wanted = True
        try:
            await self._align()
        except BrokerRefused:
            raise
        except BrokerUnavailable as exc:
            # Lost in this very moment: the keeper brings it back.
            _log.debug("%s", exc)
        while not self._closed:
            self._news.clear()
            if self._arrived and not self._paused:
                link, message = self._arrived.popleft()
                if not link.lost.is_set():
                    yield message
            else:
                await self._news.wait()

    async def ack(self, message: RawMessage) -> None:
        if self.owns(message):
            link, tag = self._origin.pop(message)
            link.ack(tag)

    async def nack(self, message: RawMessage, requeue: bool = False) -> None:
        if self.owns(message):
            link, tag = self._origin.pop(message)
            link.nack(tag, requeue)

    async def send_to_dlq(self, message: RawMessage, reason: str, history: Sequence[str] = ()) -> None:
        if not self.owns(message):
            return
        link, _ = self._origin[message]
        letter = dead_letter(message, self._dlq_name, self.queue_name, reason, history)
        # It came from this broker, however large it is.
        limits = self._settings.model_copy(update={"max_message_bytes": max(1, len(letter.body or b""))})
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._find(link, self._dlq_name)
                await publish(await link.side_channel(), letter, limits, exchange="")
        except CONNECTION_ERRORS as exc:
            raise translate(exc, self._settings) from safe_cause(exc, self._settings)
        await self.ack(message)

    def owns(self, message: RawMessage) -> bool:
        link, tag = self._origin.get(message, (None, 0))
        return link is not None and not link.lost.is_set() and tag in link.in_hand

    async def pause(self) -> None:
        self._paused = True
        await self._align_or_leave_it()

    async def resume(self) -> None:
        self._paused = False
        self._news.set()
        await self._align_or_leave_it()

    async def lag(self) -> int | None:
        """Messages that nobody has in hand."""
        try:
            async with asyncio.timeout(_HEALTH_S):
                return await self._count()
        except (BrokerUnavailable, *CONNECTION_ERRORS):
            return None

    async def health_check(self) -> bool:
        return await self.lag() is not None

    async def close(self) -> None:
        self._closed = True
        self._news.set()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        if self._link is not None:
            await self._link.close()
        self._arrived.clear()
        self._origin.clear()

    # The link --------------------------------------------------------------------------------------

    async def _open(self) -> RabbitConsumerConnection:
        link = await RabbitConsumerConnection.open(self._settings)
        try:
            async with asyncio.timeout(2 * self._settings.timeout_s):
                link.begin(await link.channel())
                await self._find(link, self.queue_name)
                await link.deliveries.basic_qos(prefetch_count=self._prefetch)
        except BaseException as exc:
            await link.close()
            if isinstance(exc, CONNECTION_ERRORS):
                raise translate(exc, self._settings) from safe_cause(exc, self._settings)
            raise
        return link

    async def _find(self, link: RabbitConsumerConnection, queue: str) -> None:
        """The queue is there, or is made; a queue that is there is taken as it is."""
        if queue in link.known:
            return
        try:
            await (await link.side_channel()).queue_declare(queue, passive=True)
        except amqp.ChannelNotFoundEntity:
            if not self._settings.declare:
                raise
            arguments: dict[str, Any] = {"x-queue-type": self._settings.queue_type}
            if self._settings.single_active_consumer and queue == self.queue_name:
                arguments["x-single-active-consumer"] = True
            await (await link.side_channel()).queue_declare(queue, durable=True, arguments=arguments)
        link.known.add(queue)

    async def _keep(self) -> None:
        """Have a link, for as long as we live."""
        backoff = Backoff()
        while True:
            assert self._link is not None
            await self._link.lost.wait()
            try:
                await self._replace(self._link, backoff)
            except (Exception, asyncio.CancelledError) as exc:
                if is_own_cancellation(exc):
                    raise
                # Calls that are under way when a connection goes may end with anything, even as if cancelled.
                _log.warning("RabbitMQ at %s: %s; trying on", self._settings.address, type(exc).__name__)
                self._link.fail(exc)

    async def _replace(self, link: RabbitConsumerConnection, backoff: Backoff) -> None:
        _log.warning(
            "RabbitMQ at %s, queue %s: lost (%s), connecting again",
            *(self._settings.address, self.queue_name, link.reason),
        )
        self._forget(link)
        if asyncio.get_running_loop().time() - link.opened_at > _GOOD_LINK_S:
            backoff.reset()
        await link.close()
        self._link = await self._open_somehow(backoff)
        _log.info("RabbitMQ at %s, queue %s: back", self._settings.address, self.queue_name)
        await self._align_or_leave_it()

    async def _open_somehow(self, backoff: Backoff) -> RabbitConsumerConnection:
        said = ""
        while True:
            await asyncio.sleep(backoff.next_s())
            try:
                return await self._open()
            except BrokerUnavailable as exc:
                if str(exc) != said:
                    _log.warning("%s; trying on", exc)
                    said = str(exc)

    def _forget(self, lost: RabbitConsumerConnection) -> None:
        self._arrived = deque(pair for pair in self._arrived if pair[0] is not lost)
        self._origin = {message: origin for message, origin in self._origin.items() if origin[0] is not lost}

    async def _align(self) -> None:
        """Have a consumer if we want messages, else have none. The channel lives on."""
        async with self._changing:
            link = self._link
            if link is None or link.lost.is_set():
                return
            try:
                if self._wanted and not self._paused and not link.consumer_tag:
                    link.consumer_tag = f"{self.consumer_group}-{secrets.token_hex(6)}"
                    await self._start_consumer(link)
                elif self._paused and link.consumer_tag:
                    tag, link.consumer_tag = link.consumer_tag, ""
                    await link.deliveries.basic_cancel(tag, timeout=self._settings.timeout_s)
            except CONNECTION_ERRORS as exc:
                link.fail(exc)
                raise translate(exc, self._settings) from safe_cause(exc, self._settings)

    async def _align_or_leave_it(self) -> None:
        """A link that fails here is lost, and the keeper does it again with the next one."""
        with suppress(BrokerUnavailable):
            await self._align()

    async def _start_consumer(self, link: RabbitConsumerConnection) -> None:
        async def on_message(delivered: DeliveredMessage) -> None:
            self._take(link, delivered)

        await link.deliveries.basic_consume(
            self.queue_name, on_message, consumer_tag=link.consumer_tag, timeout=self._settings.timeout_s
        )

    def _take(self, link: RabbitConsumerConnection, delivered: DeliveredMessage) -> None:
        message = raw_message(delivered, self._settings)
        tag = message.metadata["delivery_tag"]
        link.in_hand[tag] = None
        self._origin[message] = (link, tag)
        self._arrived.append((link, message))
        self._news.set()

    async def _count(self) -> int | None:
        if self._link is None or self._closed or self._link.lost.is_set():
            return None
        answer = await (await self._link.side_channel()).queue_declare(self.queue_name, passive=True)
        return answer.message_count


class RabbitPublisher(Publisher):
    """Writes persistent messages, `mandatory` and confirmed: to the queue named like the topic, or to `exchange` with
    the topic as routing key. What no queue takes is refused."""

    def __init__(self, connection: RabbitConfig) -> None:
        self._settings = connection
        self._link: RabbitConnection | None = None
        self._channel: Channel | None = None
        self._ready = False

    async def connect(self) -> None:
        await self._open()
        self._ready = True

    async def publish(self, messages: Sequence[OutgoingMessage]) -> list[BrokerUnavailable | None]:
        try:
            if not self._ready:
                raise BrokerUnavailable("not connected: call connect() first")
            channel = await self._open()
        except BrokerUnavailable as exc:
            return [exc] * len(messages)
        answers: list[BrokerUnavailable | None] = [None] * len(messages)
        failed: dict[tuple[str, str], BrokerUnavailable] = {}
        for lanes in _waves(messages):
            tasks = [self._publish_lane(channel, messages, places, answers, failed) for places in lanes]
            await asyncio.gather(*tasks)
        return answers

    async def health_check(self) -> bool:
        if self._link is None or self._link.lost.is_set():
            return False
        try:
            async with asyncio.timeout(_HEALTH_S):
                # A channel of its own: opening it is a question that the broker has to answer.
                await (await self._link.channel()).close()
        except (BrokerUnavailable, *CONNECTION_ERRORS):
            return False
        return True

    async def close(self) -> None:
        self._ready = False
        await self._drop()

    async def _open(self) -> Channel:
        """The channel that is there, or another one."""
        if self._channel is not None and not self._channel.is_closed and self._link and not self._link.lost.is_set():
            return self._channel
        if self._link is not None:
            _log.warning("RabbitMQ at %s: lost (%s), connecting again", self._settings.address, self._link.reason)
        await self._drop()
        self._link = await RabbitConnection.open(self._settings)
        self._channel = await self._link.channel()
        return self._channel

    async def _drop(self) -> None:
        link, self._link, self._channel = self._link, None, None
        if link is not None:
            await link.close()

    async def _publish_lane(
        self,
        channel: Channel,
        messages: Sequence[OutgoingMessage],
        places: Sequence[int],
        answers: list[BrokerUnavailable | None],
        failed: dict[tuple[str, str], BrokerUnavailable],
    ) -> None:
        """One after the other: the next is written when the one before is confirmed."""
        for place in places:
            message = messages[place]
            line = (message.topic, message.key)
            answer = failed.get(line) if message.key else None
            if answer is None:
                answer = await self._publish_one(channel, message)
            if answer is not None and message.key:
                failed[line] = answer
            answers[place] = answer

    async def _publish_one(self, channel: Channel, message: OutgoingMessage) -> BrokerUnavailable | None:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await publish(channel, message, self._settings, exchange=self._settings.exchange)
        except TimeoutError as exc:
            # Whether it was written is not known; on this link nothing else will be.
            if self._link is not None:
                self._link.fail(exc)
            return translate(exc, self._settings)
        except BrokerUnavailable as exc:
            return exc
        except CONNECTION_ERRORS as exc:
            return translate(exc, self._settings)
        return None


def _waves(messages: Sequence[OutgoingMessage]) -> list[list[list[int]]]:
    """Which messages are published side by side: lanes of one topic and key each, or of one message without key.

    Returned messages are told apart by their ids alone: of two with the same id, the second is for the next wave.
    """
    waves: list[dict[tuple[str, ...], list[int]]] = [{}]
    seen: set[str] = set()
    for place, message in enumerate(messages):
        if message.message_id and message.message_id in seen:
            waves.append({})
            seen = set()
        seen.add(message.message_id)
        lane = (message.topic, message.key) if message.key else (str(place),)
        waves[-1].setdefault(lane, []).append(place)
    return [list(wave.values()) for wave in waves]
