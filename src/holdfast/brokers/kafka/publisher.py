"""The publishing end of Kafka: an idempotent producer, so that neither a retry nor a lost answer writes a message twice
or out of order.

All messages of a call are sent at once. If the broker refuses one, everything that is still under way is called back,
and the rest of the call goes one by one: so it is known which one is at fault, and what comes after it under the same
key is not written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import Any, Final, TypeVar

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from holdfast.brokers.kafka.connection import (
    ClientLog,
    KafkaConnection,
    client_settings,
    is_of_the_topic,
    translated,
)
from holdfast.brokers.kafka.questions import Questions
from holdfast.brokers.port import Outgoing, Publisher
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

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, "holdfast-kafka-publisher")
        self._producer: Producer | None = None
        self._questions: Questions | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"KafkaPublisher({self._connection.bootstrap_servers!r})"

    async def connect(self) -> None:
        questions = await asyncio.to_thread(Questions, self._connection)
        await asyncio.to_thread(questions.reach, None, self._connection.connect_timeout_s)
        self._questions = questions

    async def publish(self, messages: Sequence[Outgoing]) -> list[BrokerUnavailable | None]:
        if not messages:
            return []
        if self._closed:
            return [BrokerUnavailable("this publisher is closed") for _ in messages]
        return await self._in_thread(partial(self._publish, messages))

    async def health_check(self) -> bool:
        return self._questions is not None and await asyncio.to_thread(self._questions.answers, _ANSWER_S)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._questions = None
            await self._in_thread(self._discard)
            self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # From here on: the thread itself ----------------------------------------------------------------

    def _publish(self, messages: Sequence[Outgoing]) -> list[BrokerUnavailable | None]:
        call = _Call(messages, monotonic() + self._connection.publish_timeout_s)
        try:
            self._send(call, call.open(), alone=False)
            if call.refusal is not None:
                _log.warning("Kafka refuses a message of %s, the rest goes one by one", len(messages))
                self._discard()
                for index in call.open():
                    self._send(call, [index], alone=True)
        except KafkaException as exc:
            call.end(translated(exc.args[0], "take the messages"))
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

    def __init__(self, messages: Sequence[Outgoing], until: float) -> None:
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
        failure = self.answers[index] = translated(error, f"take a message for {message.topic!r}")
        if is_of_the_topic(error):
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
