"""RabbitMQ adapter and publisher: quorum queues, publisher confirms, prefetch by `basic.qos`.

Consumers of a queue share its messages, so the queue itself is the consumer group; the group name appears in consumer
tags. Order per key holds within one consumer, and across consumers with `single_active_consumer`.

A message is in flight until its channel closes. Acknowledgements are batched, many in one frame; if one is lost with
its channel, the message is delivered again.
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
from holdfast.brokers.rabbitmq_messages import accept_any_header, dead_letter, publish, raw_message
from holdfast.core.retry import Backoff
from holdfast.errors import BrokerRefused, BrokerUnavailable

_log: Final = logging.getLogger("holdfast.brokers.rabbitmq")

#: Protocol maximum.
_MAX_PREFETCH: Final = 65_535
_HEALTH_S: Final = 3.0
#: The reconnect backoff is reset after a connection that lasted this long.
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
        #: Connection and delivery tag of each message in flight.
        self._origin: dict[RawMessage, tuple[RabbitConsumerConnection, int]] = {}
        self._wakeup = asyncio.Event()
        #: Serialises start and cancellation of the consumer.
        self._changing = asyncio.Lock()
        self._consuming = False
        self._paused = False
        self._closed = False

    async def connect(self) -> None:
        link = await self._open()
        if self._closed:
            await link.close()
            raise BrokerUnavailable("closed while connecting")
        self._link = link
        self._keeper = asyncio.create_task(self._keep_connected(), name=f"rabbitmq-{self.queue_name}")

    async def consume(self) -> AsyncIterator[RawMessage]:
        if self._link is None and not self._closed:
            raise BrokerUnavailable("not connected; call connect() first")
        self._consuming = True
        try:
            await self._align()
        except BrokerRefused:
            raise
        except BrokerUnavailable as exc:
            # The connection was lost just now: `_keep_connected` reconnects.
            _log.debug("%s", exc)
        while not self._closed:
            self._wakeup.clear()
            if self._arrived and not self._paused:
                link, message = self._arrived.popleft()
                if not link.lost.is_set():
                    yield message
            else:
                await self._wakeup.wait()

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
        outgoing = dead_letter(message, self._dlq_name, self.queue_name, reason, history)
        # No size check: the message came from this broker.
        limits = self._settings.model_copy(update={"max_message_bytes": max(1, len(outgoing.body or b""))})
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._find(link, self._dlq_name)
                await publish(await link.side_channel(), outgoing, limits, exchange="")
        except CONNECTION_ERRORS as exc:
            raise translate(exc, self._settings) from safe_cause(exc, self._settings)
        await self.ack(message)

    def owns(self, message: RawMessage) -> bool:
        link, tag = self._origin.get(message, (None, 0))
        return link is not None and not link.lost.is_set() and tag in link.in_flight

    async def pause(self) -> None:
        self._paused = True
        await self._try_align()

    async def resume(self) -> None:
        self._paused = False
        self._wakeup.set()
        await self._try_align()

    async def lag(self) -> int | None:
        """Number of messages that are not in flight."""
        try:
            async with asyncio.timeout(_HEALTH_S):
                return await self._count()
        except (BrokerUnavailable, *CONNECTION_ERRORS):
            return None

    async def health_check(self) -> bool:
        return await self.lag() is not None

    async def close(self) -> None:
        self._closed = True
        self._wakeup.set()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        if self._link is not None:
            await self._link.close()
        self._arrived.clear()
        self._origin.clear()

    # Connection ------------------------------------------------------------------------------------

    async def _open(self) -> RabbitConsumerConnection:
        accept_any_header()
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
        """Make sure that the queue exists: declare it if configured. An existing queue is used as it is."""
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

    async def _keep_connected(self) -> None:
        """Reconnect after each loss, until cancelled."""
        backoff = Backoff()
        while True:
            assert self._link is not None
            await self._link.lost.wait()
            try:
                await self._replace(self._link, backoff)
            except (Exception, asyncio.CancelledError) as exc:
                if is_own_cancellation(exc):
                    raise
                # Calls in progress when a connection is lost may raise anything, even CancelledError.
                _log.warning("RabbitMQ at %s failing, retrying: %s", self._settings.address, type(exc).__name__)
                self._link.fail(exc)

    async def _replace(self, link: RabbitConsumerConnection, backoff: Backoff) -> None:
        _log.warning(
            "RabbitMQ at %s, queue %s: connection lost, reconnecting: %s",
            *(self._settings.address, self.queue_name, link.reason),
        )
        self._drop_messages(link)
        if asyncio.get_running_loop().time() - link.opened_at > _GOOD_LINK_S:
            backoff.reset()
        await link.close()
        self._link = await self._open_with_retries(backoff)
        _log.info("RabbitMQ at %s, queue %s: recovered", self._settings.address, self.queue_name)
        await self._try_align()

    async def _open_with_retries(self, backoff: Backoff) -> RabbitConsumerConnection:
        last_error = ""
        while True:
            await asyncio.sleep(backoff.next_s())
            try:
                return await self._open()
            except BrokerUnavailable as exc:
                if str(exc) != last_error:
                    _log.warning("%s; retrying", exc)
                    last_error = str(exc)

    def _drop_messages(self, lost: RabbitConsumerConnection) -> None:
        self._arrived = deque(pair for pair in self._arrived if pair[0] is not lost)
        self._origin = {message: origin for message, origin in self._origin.items() if origin[0] is not lost}

    async def _align(self) -> None:
        """Start or cancel the consumer, as `consume`, `pause` and `resume` require. The channel stays open."""
        async with self._changing:
            link = self._link
            if link is None or link.lost.is_set():
                return
            try:
                if self._consuming and not self._paused and not link.consumer_tag:
                    link.consumer_tag = f"{self.consumer_group}-{secrets.token_hex(6)}"
                    await self._start_consumer(link)
                elif self._paused and link.consumer_tag:
                    tag, link.consumer_tag = link.consumer_tag, ""
                    await link.deliveries.basic_cancel(tag, timeout=self._settings.timeout_s)
            except CONNECTION_ERRORS as exc:
                link.fail(exc)
                raise translate(exc, self._settings) from safe_cause(exc, self._settings)

    async def _try_align(self) -> None:
        """Like `_align`, but if it fails, `_keep_connected` repeats it on the next connection."""
        with suppress(BrokerUnavailable):
            await self._align()

    async def _start_consumer(self, link: RabbitConsumerConnection) -> None:
        async def on_message(delivered: DeliveredMessage) -> None:
            self._on_delivered(link, delivered)

        await link.deliveries.basic_consume(
            self.queue_name, on_message, consumer_tag=link.consumer_tag, timeout=self._settings.timeout_s
        )

    def _on_delivered(self, link: RabbitConsumerConnection, delivered: DeliveredMessage) -> None:
        message = raw_message(delivered, self._settings)
        tag = message.metadata["delivery_tag"]
        link.in_flight[tag] = None
        self._origin[message] = (link, tag)
        self._arrived.append((link, message))
        self._wakeup.set()

    async def _count(self) -> int | None:
        if self._link is None or self._closed or self._link.lost.is_set():
            return None
        answer = await (await self._link.side_channel()).queue_declare(self.queue_name, passive=True)
        return answer.message_count


class RabbitPublisher(Publisher):
    """Publisher of persistent, `mandatory`, confirmed messages.

    Writes to the queue named like the topic, or to `exchange` with the topic as routing key. A message that cannot be
    routed to a queue is refused.
    """

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
                raise BrokerUnavailable("not connected; call connect() first")
            channel = await self._open()
        except BrokerUnavailable as exc:
            return [exc] * len(messages)
        answers: list[BrokerUnavailable | None] = [None] * len(messages)
        failed: dict[tuple[str, str], BrokerUnavailable] = {}
        for lanes in _waves(messages):
            tasks = [self._publish_lane(channel, messages, indices, answers, failed) for indices in lanes]
            await asyncio.gather(*tasks)
        return answers

    async def health_check(self) -> bool:
        if self._link is None or self._link.lost.is_set():
            return False
        try:
            async with asyncio.timeout(_HEALTH_S):
                # Open a separate channel: the broker has to answer that.
                await (await self._link.channel()).close()
        except (BrokerUnavailable, *CONNECTION_ERRORS):
            return False
        return True

    async def close(self) -> None:
        self._ready = False
        await self._drop()

    async def _open(self) -> Channel:
        """The current channel, or a new one after a loss."""
        if self._channel is not None and not self._channel.is_closed and self._link and not self._link.lost.is_set():
            return self._channel
        if self._link is not None:
            _log.warning("RabbitMQ at %s: connection lost, reconnecting: %s", self._settings.address, self._link.reason)
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
        indices: Sequence[int],
        answers: list[BrokerUnavailable | None],
        failed: dict[tuple[str, str], BrokerUnavailable],
    ) -> None:
        """Publish one by one: the next message is written when the previous one is confirmed."""
        for index in indices:
            message = messages[index]
            ordered_by = (message.topic, message.key)
            answer = failed.get(ordered_by) if message.key else None
            if answer is None:
                answer = await self._publish_one(channel, message)
            if answer is not None and message.key:
                failed[ordered_by] = answer
            answers[index] = answer

    async def _publish_one(self, channel: Channel, message: OutgoingMessage) -> BrokerUnavailable | None:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await publish(channel, message, self._settings, exchange=self._settings.exchange)
        except TimeoutError as exc:
            # Unknown whether it was written; nothing more is written on this connection.
            if self._link is not None:
                self._link.fail(exc)
            return translate(exc, self._settings)
        except BrokerUnavailable as exc:
            return exc
        except CONNECTION_ERRORS as exc:
            return translate(exc, self._settings)
        return None


def _waves(messages: Sequence[OutgoingMessage]) -> list[list[list[int]]]:
    """Group messages, by index, into waves of lanes that can be published concurrently.

    A lane has the messages of one topic and key, or one message without a key.

    Returned messages are identified only by id: of two with the same id, the second goes to the next wave.
    """
    waves: list[dict[tuple[str, ...], list[int]]] = [{}]
    ids: set[str] = set()
    for index, message in enumerate(messages):
        if message.message_id and message.message_id in ids:
            waves.append({})
            ids = set()
        ids.add(message.message_id)
        lane = (message.topic, message.key) if message.key else (str(index),)
        waves[-1].setdefault(lane, []).append(index)
    return [list(wave.values()) for wave in waves]
