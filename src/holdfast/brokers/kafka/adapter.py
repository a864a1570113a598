"""Kafka consumer (`KafkaAdapter`) and idempotent producer (`KafkaPublisher`).

The consumer delivers at least once: a commit never passes a message in flight, so a message that was not acknowledged
is delivered again, to this process or to another one of its group. Messages of a partition arrive in its order; one
that is refused with `requeue` is delivered again before anything new of its partition.

The producer's own retries neither duplicate nor reorder messages. All messages of a `publish` call are sent together.
If the broker refuses one, those not yet confirmed are purged and sent one by one: this identifies the refused message,
and later messages of the same topic and key are not written.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from heapq import heappop, heappush
from time import monotonic
from typing import Any, Final, TypeVar

import msgspec
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from holdfast.brokers.kafka.connection import (
    ClientLog,
    KafkaAdmin,
    KafkaConfig,
    MessageTooLarge,
    client_settings,
    is_topic_error,
    translate,
)
from holdfast.brokers.kafka.offsets import InFlightOffsets
from holdfast.brokers.kafka.poller import Poller
from holdfast.brokers.port import OutgoingMessage, Publisher, QueueAdapter, RawMessage, dead_letter_headers
from holdfast.errors import BrokerUnavailable
from holdfast.observe.redact import redact

T = TypeVar("T")

_log: Final = logging.getLogger("holdfast.brokers.kafka")

_ANSWER_S: Final = 2.0
#: Brokers apply a topic's `max.message.bytes` to whole batches.
_BATCH_BYTES: Final = 100_000
_PIECE_S: Final = 0.1
#: Limit for the reports of purged messages, which need no broker.
_PURGED_S: Final = 1.0
_PURGED: Final = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})


class KafkaPublisher(Publisher):
    """Idempotent producer in its own thread. After a failure the next call creates a new producer."""

    def __init__(self, connection: KafkaConfig) -> None:
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, "holdfast-kafka-publisher")
        self._producer: Producer | None = None
        self._admin: KafkaAdmin | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"KafkaPublisher({self._connection.bootstrap_servers!r})"

    async def connect(self) -> None:
        admin = await asyncio.to_thread(KafkaAdmin, self._connection)
        await asyncio.to_thread(admin.check_topic, None, self._connection.connect_timeout_s)
        self._admin = admin

    async def publish(self, messages: Sequence[OutgoingMessage]) -> list[BrokerUnavailable | None]:
        if not messages:
            return []
        if self._closed:
            return [BrokerUnavailable("publisher is closed") for _ in messages]
        return await self._in_thread(partial(self._publish, messages))

    async def health_check(self) -> bool:
        return self._admin is not None and await asyncio.to_thread(self._admin.is_up, _ANSWER_S)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._admin = None
            await self._in_thread(self._discard)
            self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # Runs in the thread -----------------------------------------------------------------------------

    def _publish(self, messages: Sequence[OutgoingMessage]) -> list[BrokerUnavailable | None]:
        call = _Call(messages, monotonic() + self._connection.publish_timeout_s)
        try:
            self._send(call, call.open(), alone=False)
            if call.refusal is not None:
                _log.warning("Kafka refused one of %s messages, sending the rest one by one", len(messages))
                self._discard()
                for index in call.open():
                    self._send(call, [index], alone=True)
        except KafkaException as exc:
            call.end(translate(exc.args[0], "accept the messages"))
            self._discard()
        return call.end(BrokerUnavailable(f"Kafka did not confirm within {self._connection.publish_timeout_s} s"))

    def _send(self, call: _Call, indices: Sequence[int], *, alone: bool) -> None:
        producer = self._producer = self._producer or self._new_producer()
        for index in indices:
            if call.refusal is not None and not alone:
                break
            if self._closed or not call.may_send(index):
                continue
            self._produce(producer, call, index, partial(self._on_delivery, producer, call, index, alone))
        while len(producer) and monotonic() < call.until and not self._closed:
            # In short flushes, so that `close` does not wait for the broker.
            producer.flush(min(_PIECE_S, max(0.0, call.until - monotonic())))
        if len(producer):
            # No message of this call may be written after it was reported as failed.
            self._discard()

    def _produce(self, producer: Producer, call: _Call, index: int, on_delivery: Callable[..., None]) -> None:
        message = call.messages[index]
        fields: dict[str, Any] = {"key": message.key.encode() if message.key else None, "on_delivery": on_delivery}
        if message.headers:
            fields["headers"] = [(name, value.encode()) for name, value in message.headers.items()]
        while monotonic() < call.until:
            try:
                producer.produce(message.topic, message.body, **fields)
            except KafkaException as exc:
                call.fail(index, exc.args[0])
            except BufferError:
                # The client's own queue is full: send some of it first.
                producer.poll(0.05)
                continue
            return

    def _on_delivery(
        self, producer: Producer, call: _Call, index: int, alone: bool, error: KafkaError | None, _: Message
    ) -> None:
        if error is None:
            call.answers[index] = None
        elif error.code() in _PURGED:
            return
        elif alone:
            call.fail(index, error)
        elif call.refusal is None:
            # Purge in the callback: otherwise the client would send the next message with the same key.
            call.refusal = error
            producer.purge(in_queue=True, in_flight=True)

    def _discard(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None and len(producer):
            producer.purge(in_queue=True, in_flight=True)
            producer.flush(_PURGED_S)

    def _new_producer(self) -> Producer:
        connection = self._connection
        settings = {
            **client_settings(connection),
            "enable.idempotence": True,
            "acks": "all",
            # `publish` sets one deadline for all messages of a call: a late message must not be overtaken.
            "message.timeout.ms": 0,
            "linger.ms": connection.linger_ms,
            "compression.type": connection.compression,
            "message.max.bytes": connection.max_message_bytes,
            "batch.size": min(_BATCH_BYTES, connection.max_message_bytes),
            # Same partition for a key as the Java client.
            "partitioner": "murmur2_random",
            "error_cb": _on_error,
        }
        return Producer(settings, logger=ClientLog())


class _Call:
    """The messages of one `publish` call and their answers so far."""

    def __init__(self, messages: Sequence[OutgoingMessage], until: float) -> None:
        self.messages = messages
        self.until = until
        self.answers: dict[int, BrokerUnavailable | None] = {}
        #: First refusal while messages are sent together.
        self.refusal: KafkaError | None = None
        self._failed: dict[tuple[str, str | None], BrokerUnavailable] = {}

    def open(self) -> list[int]:
        return [index for index in range(len(self.messages)) if index not in self.answers]

    def may_send(self, index: int) -> bool:
        """Whether to send it: not after a failed message with the same topic and key, nor after the deadline."""
        message = self.messages[index]
        whole = self._failed.get((message.topic, None))
        before = whole or self._failed.get((message.topic, message.key))
        if before is None:
            return monotonic() < self.until
        text = str(before) if whole else f"not written: an earlier message with the same key failed: {before}"
        self.answers[index] = type(before)(text)
        return False

    def fail(self, index: int, error: KafkaError) -> None:
        message = self.messages[index]
        failure = self.answers[index] = translate(error, f"accept a message for {message.topic!r}")
        if is_topic_error(error):
            self._failed[message.topic, None] = failure
        elif message.key:
            self._failed[message.topic, message.key] = failure

    def end(self, failure: BrokerUnavailable) -> list[BrokerUnavailable | None]:
        """All answers, with `failure` for messages that have none."""
        for index in self.open():
            self.answers[index] = type(failure)(str(failure))
        return [self.answers[index] for index in range(len(self.messages))]


def _on_error(error: KafkaError) -> None:
    # The answers report errors to the caller; this callback only keeps the client from writing to stderr.
    _log.debug("publisher: %s (%s)", redact(error.str()), error.name())


#: How long the last lag is reused.
_LAG_FRESH_S: Final = 2.0
#: Limit for leaving the group. If the broker is unreachable, the session timeout removes the member.
_CLOSE_S: Final = 5.0
_DEAD_LETTER_BYTES: Final = 1_000_000_000


class KafkaAdapter(QueueAdapter):
    """A consumer of one topic. `queue_name` is the topic, `consumer_group` the group.

    Dead letters go to the topic `dlq_name`. Default: `<queue_name>.dlq`.
    """

    def __init__(
        self,
        connection: KafkaConfig,
        queue_name: str,
        consumer_group: str,
        *,
        prefetch: int = 100,
        dlq_name: str | None = None,
    ) -> None:
        self._connection = connection
        self._topic = queue_name
        self._group = consumer_group
        self._dlq = dlq_name or f"{queue_name}.dlq"
        self._offsets = InFlightOffsets(prefetch)
        #: Messages to redeliver, lowest offset first, before new ones.
        self._again: list[tuple[int, int, int, RawMessage]] = []
        self._received: deque[RawMessage] = deque()
        self._wakeup = asyncio.Event()
        self._paused = False
        self._closed = False
        self._poller: Poller | None = None
        self._admin: KafkaAdmin | None = None
        self._dlq_publisher: KafkaPublisher | None = None
        self._lag: tuple[float, int | None] | None = None

    def __repr__(self) -> str:
        return f"KafkaAdapter({self._topic!r}, {self._group!r})"

    async def connect(self) -> None:
        admin = await asyncio.to_thread(KafkaAdmin, self._connection)
        await asyncio.to_thread(admin.check_topic, self._topic, self._connection.connect_timeout_s)
        if self._closed:
            raise BrokerUnavailable("closed while connecting")
        self._admin = admin
        self._poller = Poller(self._connection, self._topic, self._group, self._offsets, self._on_messages)
        self._poller.start()

    async def consume(self) -> AsyncIterator[RawMessage]:
        while not self._closed:
            message = None if self._paused else self._next()
            if message is not None:
                yield message
            else:
                self._wakeup.clear()
                await self._wakeup.wait()

    async def ack(self, message: RawMessage) -> None:
        self._offsets.ack(message)

    async def nack(self, message: RawMessage, requeue: bool = False) -> None:
        """Refuse the message. Without `requeue` this is `ack`: Kafka has no dead-letter queues."""
        if not requeue:
            self._offsets.ack(message)
            return
        deliveries = self._offsets.redeliver(message)
        if deliveries is not None:
            at = message.metadata
            again = msgspec.structs.replace(message, deliveries=deliveries)
            heappush(self._again, (at["partition"], at["offset"], at["share"], again))
            self._wakeup.set()

    async def send_to_dlq(self, message: RawMessage, reason: str, history: Sequence[str] = ()) -> None:
        if self._dlq_publisher is None:
            # Consumed messages may be larger than the limit for published ones.
            unlimited = self._connection.model_copy(update={"max_message_bytes": _DEAD_LETTER_BYTES})
            self._dlq_publisher = KafkaPublisher(unlimited)
        headers = dead_letter_headers(message, self._topic, reason, history)
        dead_letter = OutgoingMessage(self._dlq, message.body, headers, message.key, message.message_id)
        (failure,) = await self._dlq_publisher.publish([dead_letter])
        if isinstance(failure, MessageTooLarge):
            _log.warning("message %s: dead letter too large, written without reason and history", message.message_id)
            dead_letter = msgspec.structs.replace(dead_letter, headers=message.headers)
            (failure,) = await self._dlq_publisher.publish([dead_letter])
        if failure is not None:
            raise failure
        self._offsets.ack(message)

    def owns(self, message: RawMessage) -> bool:
        """Whether an `ack` would still count.

        If so, the message counts as being handled: a revocation of its partition waits briefly for its `ack`.
        """
        return self._offsets.holds(message)

    async def pause(self) -> None:
        self._paused = True
        if self._poller is not None:
            self._poller.pause()

    async def resume(self) -> None:
        self._paused = False
        self._wakeup.set()
        if self._poller is not None:
            self._poller.resume()

    async def lag(self) -> int | None:
        """Lag of the whole group, from committed offsets. At most a few seconds old."""
        if self._admin is None:
            return None
        if self._lag is None or monotonic() - self._lag[0] > _LAG_FRESH_S:
            done = self._offsets.done_up_to()
            waiting = await asyncio.to_thread(self._admin.lag, self._topic, self._group, done, _ANSWER_S)
            self._lag = (monotonic(), waiting)
        return self._lag[1]

    async def health_check(self) -> bool:
        return self._admin is not None and await asyncio.to_thread(self._admin.is_up, _ANSWER_S)

    async def close(self) -> None:
        self._closed = True
        self._wakeup.set()
        poller, self._poller = self._poller, None
        dlq_publisher, self._dlq_publisher = self._dlq_publisher, None
        self._admin = None
        if dlq_publisher is not None:
            await dlq_publisher.close()
        if poller is not None and not await asyncio.to_thread(poller.stop, _CLOSE_S):
            _log.warning("consumer of %s did not leave its group within %s s", self._topic, _CLOSE_S)
        self._offsets.revoke()
        self._received.clear()
        self._again.clear()

    def _on_messages(self, batch: list[RawMessage]) -> None:
        self._received.extend(batch)
        self._wakeup.set()

    def _next(self) -> RawMessage | None:
        """The next message, skipping those of partitions that were revoked meanwhile."""
        while self._again:
            message = heappop(self._again)[3]
            if self._offsets.can_deliver(message):
                return message
        while self._received:
            message = self._received.popleft()
            if self._offsets.can_deliver(message):
                return message
        return None
