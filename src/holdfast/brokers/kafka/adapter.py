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

_log: Final = logging.getLogger("holdfast.kafka")

_ANSWER_S: Final = 2.0
#: Brokers apply a topic's `max.message.bytes` to whole batches.
_BATCH_BYTES: Final = 100_000
_PIECE_S: Final = 0.1
#: Messages that are called back are told so at once.
_CALLED_BACK_S: Final = 1.0
_CALLED_BACK: Final = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})


class KafkaPublisher(Publisher):
    """One producer, in a thread of its own. After a failure the next call has a new one."""

    def __init__(self, connection: KafkaConfig) -> None:
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, "holdfast-kafka-publisher")
        self._producer: Producer | None = None
        self._questions: KafkaAdmin | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"KafkaPublisher({self._connection.bootstrap_servers!r})"

    async def connect(self) -> None:
        questions = await asyncio.to_thread(KafkaAdmin, self._connection)
        await asyncio.to_thread(questions.check_topic, None, self._connection.connect_timeout_s)
        self._questions = questions

    async def publish(self, messages: Sequence[OutgoingMessage]) -> list[BrokerUnavailable | None]:
        if not messages:
            return []
        if self._closed:
            return [BrokerUnavailable("this publisher is closed") for _ in messages]
        return await self._in_thread(partial(self._publish, messages))

    async def health_check(self) -> bool:
        return self._questions is not None and await asyncio.to_thread(self._questions.is_up, _ANSWER_S)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._questions = None
            await self._in_thread(self._discard)
            self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # From here on: the thread itself ----------------------------------------------------------------

    def _publish(self, messages: Sequence[OutgoingMessage]) -> list[BrokerUnavailable | None]:
        call = _Call(messages, monotonic() + self._connection.publish_timeout_s)
        try:
            self._send(call, call.open(), alone=False)
            if call.refusal is not None:
                _log.warning("Kafka refuses a message of %s, the rest goes one by one", len(messages))
                self._discard()
                for index in call.open():
                    self._send(call, [index], alone=True)
        except KafkaException as exc:
            call.end(translate(exc.args[0], "take the messages"))
            self._discard()
        return call.end(BrokerUnavailable(f"Kafka has not confirmed within {self._connection.publish_timeout_s} s"))

    def _send(self, call: _Call, indices: Sequence[int], *, alone: bool) -> None:
        producer = self._producer = self._producer or self._new_producer()
        for index in indices:
            if call.refusal is not None and not alone:
                break
            if self._closed or not call.may_send(index):
                continue
            self._produce(producer, call, index, partial(self._told, producer, call, index, alone))
        while len(producer) and monotonic() < call.until and not self._closed:
            # In pieces: who closes the publisher does not wait for the broker.
            producer.flush(min(_PIECE_S, max(0.0, call.until - monotonic())))
        if len(producer):
            # Nothing of this call may be written once it has been told as failed.
            self._discard()

    def _produce(self, producer: Producer, call: _Call, index: int, told: Callable[..., None]) -> None:
        message = call.messages[index]
        fields: dict[str, Any] = {"key": message.key.encode() if message.key else None, "on_delivery": told}
        if message.headers:
            fields["headers"] = [(name, value.encode()) for name, value in message.headers.items()]
        while monotonic() < call.until:
            try:
                producer.produce(message.topic, message.body, **fields)
            except KafkaException as exc:
                call.fail(index, exc.args[0])
            except BufferError:
                # The client's own queue is full: let some of it out first.
                producer.poll(0.05)
                continue
            return

    def _told(
        self, producer: Producer, call: _Call, index: int, alone: bool, error: KafkaError | None, _: Message
    ) -> None:
        if error is None:
            call.answers[index] = None
        elif error.code() in _CALLED_BACK:
            return
        elif alone:
            call.fail(index, error)
        elif call.refusal is None:
            # At once: the client would go on with what comes next under the same key.
            call.refusal = error
            producer.purge(in_queue=True, in_flight=True)

    def _discard(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None and len(producer):
            producer.purge(in_queue=True, in_flight=True)
            producer.flush(_CALLED_BACK_S)

    def _new_producer(self) -> Producer:
        connection = self._connection
        settings = {
            **client_settings(connection),
            "enable.idempotence": True,
            "acks": "all",
            # Ends are ours to set, for all messages of a call together: one that is late must not be overtaken.
            "message.timeout.ms": 0,
            "linger.ms": connection.linger_ms,
            "compression.type": connection.compression,
            "message.max.bytes": connection.max_message_bytes,
            "batch.size": min(_BATCH_BYTES, connection.max_message_bytes),
            # The same partition for the same key as with Kafka's own clients.
            "partitioner": "murmur2_random",
            "error_cb": _complained,
        }
        return Producer(settings, logger=ClientLog())


class _Call:
    """The messages of one call, and what is known of each."""

    def __init__(self, messages: Sequence[OutgoingMessage], until: float) -> None:
        self.messages = messages
        self.until = until
        self.answers: dict[int, BrokerUnavailable | None] = {}
        #: The first one, of a message that went together with others.
        self.refusal: KafkaError | None = None
        self._failed: dict[tuple[str, str | None], BrokerUnavailable] = {}

    def open(self) -> list[int]:
        return [index for index in range(len(self.messages)) if index not in self.answers]

    def may_send(self, index: int) -> bool:
        """Not after one of the same topic and key that failed, nor after the end of the time."""
        message = self.messages[index]
        whole = self._failed.get((message.topic, None))
        before = whole or self._failed.get((message.topic, message.key))
        if before is None:
            return monotonic() < self.until
        text = str(before) if whole else f"not written, because one before it with the same key was not: {before}"
        self.answers[index] = type(before)(text)
        return False

    def fail(self, index: int, error: KafkaError) -> None:
        message = self.messages[index]
        failure = self.answers[index] = translate(error, f"take a message for {message.topic!r}")
        if is_topic_error(error):
            self._failed[message.topic, None] = failure
        elif message.key:
            self._failed[message.topic, message.key] = failure

    def end(self, failure: BrokerUnavailable) -> list[BrokerUnavailable | None]:
        """The answers; `failure` for those that have none."""
        for index in self.open():
            self.answers[index] = type(failure)(str(failure))
        return [self.answers[index] for index in range(len(self.messages))]


def _complained(error: KafkaError) -> None:
    # Who publishes is told by the answers; this only keeps the client from shouting.
    _log.debug("publisher: %s (%s)", redact(error.str()), error.name())


#: For so long the last answer about the lag will do.
_LAG_FRESH_S: Final = 2.0
#: A broker that is away cannot be told that we go. Its group finds out by itself.
_CLOSE_S: Final = 5.0
_LETTER_BYTES: Final = 1_000_000_000


class KafkaAdapter(QueueAdapter):
    """`queue_name` is the topic, `consumer_group` the group; dead letters go to the topic `<queue>.dlq`."""

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
        self._holdings = InFlightOffsets(prefetch)
        #: What is to come once more, lowest first; it goes before what has come since.
        self._again: list[tuple[int, int, int, RawMessage]] = []
        self._came: deque[RawMessage] = deque()
        self._news = asyncio.Event()
        self._paused = False
        self._closed = False
        self._poller: Poller | None = None
        self._questions: KafkaAdmin | None = None
        self._letters: KafkaPublisher | None = None
        self._lag: tuple[float, int | None] | None = None

    def __repr__(self) -> str:
        return f"KafkaAdapter({self._topic!r}, {self._group!r})"

    async def connect(self) -> None:
        questions = await asyncio.to_thread(KafkaAdmin, self._connection)
        await asyncio.to_thread(questions.check_topic, self._topic, self._connection.connect_timeout_s)
        if self._closed:
            raise BrokerUnavailable("closed while it was connecting")
        self._questions = questions
        self._poller = Poller(self._connection, self._topic, self._group, self._holdings, self._arrived)
        self._poller.start()

    async def consume(self) -> AsyncIterator[RawMessage]:
        while not self._closed:
            message = None if self._paused else self._next()
            if message is not None:
                yield message
            else:
                self._news.clear()
                await self._news.wait()

    async def ack(self, message: RawMessage) -> None:
        self._holdings.ack(message)

    async def nack(self, message: RawMessage, requeue: bool = False) -> None:
        """Kafka has no place for messages that are dropped: without `requeue` this is `ack`."""
        if not requeue:
            self._holdings.ack(message)
            return
        deliveries = self._holdings.redeliver(message)
        if deliveries is not None:
            place = message.metadata
            again = msgspec.structs.replace(message, deliveries=deliveries)
            heappush(self._again, (place["partition"], place["offset"], place["share"], again))
            self._news.set()

    async def send_to_dlq(self, message: RawMessage, reason: str, history: Sequence[str] = ()) -> None:
        if self._letters is None:
            # As large as the messages are that come, whatever we may publish else.
            roomy = self._connection.model_copy(update={"max_message_bytes": _LETTER_BYTES})
            self._letters = KafkaPublisher(roomy)
        headers = dead_letter_headers(message, self._topic, reason, history)
        letter = OutgoingMessage(self._dlq, message.body, headers, message.key, message.message_id)
        (failure,) = await self._letters.publish([letter])
        if isinstance(failure, MessageTooLarge):
            _log.warning("message %s has no room for what there is to say of it", message.message_id)
            (failure,) = await self._letters.publish([msgspec.structs.replace(letter, headers=message.headers)])
        if failure is not None:
            raise failure
        self._holdings.ack(message)

    def owns(self, message: RawMessage) -> bool:
        """A yes also says that the message is being handed over: should its partition be taken away, we wait briefly
        for its `ack`."""
        return self._holdings.holds(message)

    async def pause(self) -> None:
        self._paused = True
        if self._poller is not None:
            self._poller.pause()

    async def resume(self) -> None:
        self._paused = False
        self._news.set()
        if self._poller is not None:
            self._poller.resume()

    async def lag(self) -> int | None:
        """Of the whole group, from what is committed; a few seconds old at most."""
        if self._questions is None:
            return None
        if self._lag is None or monotonic() - self._lag[0] > _LAG_FRESH_S:
            done = self._holdings.done_up_to()
            waiting = await asyncio.to_thread(self._questions.lag, self._topic, self._group, done, _ANSWER_S)
            self._lag = (monotonic(), waiting)
        return self._lag[1]

    async def health_check(self) -> bool:
        return self._questions is not None and await asyncio.to_thread(self._questions.is_up, _ANSWER_S)

    async def close(self) -> None:
        self._closed = True
        self._news.set()
        poller, self._poller = self._poller, None
        letters, self._letters = self._letters, None
        self._questions = None
        if letters is not None:
            await letters.close()
        if poller is not None and not await asyncio.to_thread(poller.stop, _CLOSE_S):
            _log.warning("Kafka did not take leave of the consumer of %s within %s s", self._topic, _CLOSE_S)
        self._holdings.revoke()
        self._came.clear()
        self._again.clear()

    def _arrived(self, batch: list[RawMessage]) -> None:
        self._came.extend(batch)
        self._news.set()

    def _next(self) -> RawMessage | None:
        """Of a partition that was taken away in the meantime nothing is delivered."""
        while self._again:
            message = heappop(self._again)[3]
            if self._holdings.can_deliver(message):
                return message
        while self._came:
            message = self._came.popleft()
            if self._holdings.can_deliver(message):
                return message
        return None
