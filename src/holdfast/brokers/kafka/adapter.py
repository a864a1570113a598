"""The consuming end of a Kafka topic.

At least once: a commit never passes a message in hand, so whatever happens to this process, what was not acknowledged
is delivered again, to it or to another one of its group. Order per key is the partition's: messages come in it, and one
that is refused to be requeued comes again before everything else of its partition.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from heapq import heappop, heappush
from time import monotonic
from typing import Final

import msgspec

from holdfast.brokers.kafka.connection import KafkaConnection, MessageTooLarge
from holdfast.brokers.kafka.holdings import Holdings
from holdfast.brokers.kafka.poller import Poller
from holdfast.brokers.kafka.publisher import KafkaPublisher
from holdfast.brokers.kafka.questions import Questions
from holdfast.brokers.letters import dead_headers
from holdfast.brokers.port import Outgoing, QueueAdapter, RawMessage
from holdfast.errors import BrokerUnavailable

_log: Final = logging.getLogger("holdfast.kafka")

_ANSWER_S: Final = 2.0
#: For so long the last answer about the lag will do.
_LAG_FRESH_S: Final = 2.0
#: A broker that is away cannot be told that we go. Its group finds out by itself.
_CLOSE_S: Final = 5.0
_LETTER_BYTES: Final = 1_000_000_000


class KafkaAdapter(QueueAdapter):
    """`queue_name` is the topic, `consumer_group` the group; dead letters go to the topic `<queue>.dlq`."""

    def __init__(
        self,
        connection: KafkaConnection,
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
        self._holdings = Holdings(prefetch)
        #: What is to come once more, lowest first; it goes before what has come since.
        self._again: list[tuple[int, int, int, RawMessage]] = []
        self._came: deque[RawMessage] = deque()
        self._news = asyncio.Event()
        self._paused = False
        self._closed = False
        self._poller: Poller | None = None
        self._questions: Questions | None = None
        self._letters: KafkaPublisher | None = None
        self._lag: tuple[float, int | None] | None = None

    def __repr__(self) -> str:
        return f"KafkaAdapter({self._topic!r}, {self._group!r})"

    async def connect(self) -> None:
        questions = await asyncio.to_thread(Questions, self._connection)
        await asyncio.to_thread(questions.reach, self._topic, self._connection.connect_timeout_s)
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
        self._holdings.settle(message)

    async def nack(self, message: RawMessage, requeue: bool = False) -> None:
        """Kafka has no place for messages that are dropped: without `requeue` this is `ack`."""
        if not requeue:
            self._holdings.settle(message)
            return
        deliveries = self._holdings.again(message)
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
        headers = dead_headers(message, self._topic, reason, history)
        letter = Outgoing(self._dlq, message.body, headers, message.key, message.message_id)
        (failure,) = await self._letters.publish([letter])
        if isinstance(failure, MessageTooLarge):
            _log.warning("message %s has no room for what there is to say of it", message.message_id)
            (failure,) = await self._letters.publish([msgspec.structs.replace(letter, headers=message.headers)])
        if failure is not None:
            raise failure
        self._holdings.settle(message)

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
        return self._questions is not None and await asyncio.to_thread(self._questions.answers, _ANSWER_S)

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
        self._holdings.lose()
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
