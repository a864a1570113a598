"""SQS consumer: long polls, batches of ten, visibility extended while a message is in flight.

Consumers of a queue share its messages, so the queue itself is the consumer group. FIFO queues keep order per key (the
key is the message group); standard queues do not.

A message is in flight until its visibility timeout ends by the local clock. If it is not extended in time, it is
lost; on a FIFO queue all messages of its key in flight are lost with it, so that none is handled before it. Deletions
are batched; if one does not arrive, the message is delivered again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from holdfast.brokers.port import QueueAdapter, RawMessage
from holdfast.brokers.sqs_connection import (
    BATCH,
    SqsClient,
    dead_letter,
    decode,
    default_dlq_name,
    encode,
    is_fifo,
    size_of,
)
from holdfast.brokers.sqs_connection import SqsConfig as SqsConfig
from holdfast.brokers.sqs_publisher import SqsPublisher as SqsPublisher
from holdfast.core.retry import Backoff
from holdfast.errors import BrokerUnavailable

_log: Final = logging.getLogger("holdfast.brokers.sqs")

_HEALTH_S: Final = 3.0
#: How long `close` waits for long polls.
_CLOSE_POLLS_S: Final = 0.3
#: Pause between short polls of an empty queue.
_SHORT_POLL_S: Final = 0.05
#: Concurrent requests for settled messages.
_WRITERS: Final = 4
#: No messages are received while more settled ones than this are unsent.
_MOST_SETTLED: Final = 1_000


@dataclass(slots=True, eq=False)
class _ReceivedMessage:
    """A message in flight."""

    message: RawMessage
    handle: str
    #: By the event loop's clock.
    prolonged_at: float
    #: How to settle it. None: delete; otherwise seconds until it is visible again.
    visible_in_s: int | None = None


class SqsAdapter(QueueAdapter):
    """A consumer of one queue."""

    def __init__(
        self,
        connection: SqsConfig,
        queue_name: str,
        consumer_group: str,
        *,
        prefetch: int = 100,
        dlq_name: str | None = None,
    ) -> None:
        self.queue_name = queue_name
        self.consumer_group = consumer_group
        self._settings = connection
        self._prefetch = prefetch
        self._dlq_name = dlq_name or default_dlq_name(queue_name)
        self._is_fifo = is_fifo(queue_name)
        self._client = SqsClient(connection)
        self._url = ""
        #: Whether the queue has a redrive policy.
        self._has_redrive = False
        self._in_flight: dict[RawMessage, _ReceivedMessage] = {}
        self._arrived: deque[RawMessage] = deque()
        self._settled: deque[_ReceivedMessage] = deque()
        #: Messages that pending receive requests may return.
        self._requested = 0
        #: The last batch was full, so there are more messages.
        self._has_more = False
        self._wakeup = asyncio.Event()
        self._has_capacity = asyncio.Event()
        self._work = asyncio.Event()
        self._closing = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._receivers: list[asyncio.Task[None]] = []
        self._paused = False
        self._closed = False
        #: No more messages will be settled.
        self._all_settled = False

    async def connect(self) -> None:
        await self._client.open()
        try:
            async with asyncio.timeout(3 * self._settings.timeout_s):
                self._url = await self._client.url_of(self.queue_name, declare=self._settings.declare)
                self._has_redrive = "RedrivePolicy" in await self._attributes("RedrivePolicy")
        except BaseException as exc:
            await self._client.close()
            if isinstance(exc, TimeoutError):
                raise self._client.translate(exc) from None
            raise
        if self._closed:
            await self._client.close()
            raise BrokerUnavailable("closed while connecting")
        writers = [self._write_settled() for _ in range(_WRITERS)]
        self._tasks = [asyncio.create_task(work) for work in (self._prolong(), *writers)]

    async def consume(self) -> AsyncIterator[RawMessage]:
        if not self._client.is_open and not self._closed:
            raise BrokerUnavailable("not connected; call connect() first")
        if not self._receivers and not self._closed:
            count = min(self._settings.receives, -(-self._prefetch // BATCH))
            self._receivers = [asyncio.create_task(self._receive(first=n == 0)) for n in range(count)]
        while not self._closed:
            self._wakeup.clear()
            if self._arrived and not self._paused:
                message = self._arrived.popleft()
                if self.owns(message):
                    yield message
            else:
                await self._wakeup.wait()

    async def ack(self, message: RawMessage) -> None:
        self._settle(message, None)

    async def nack(self, message: RawMessage, requeue: bool = False) -> None:
        """Refuse the message. Without `requeue`, leave it to the redrive policy; if there is none, delete it.

        The redrive policy counts receives.
        """
        if requeue:
            self._settle(message, 0)
        elif self._has_redrive:
            self._release(message)
        else:
            self._settle(message, None)

    async def send_to_dlq(self, message: RawMessage, reason: str, history: Sequence[str] = ()) -> None:
        if not self.owns(message):
            return
        outgoing = dead_letter(message, self._dlq_name, self.queue_name, reason, history)
        entry = encode(outgoing, fifo=is_fifo(self._dlq_name))
        if size_of(entry) > self._settings.max_message_bytes:
            # The message itself fits: it came from SQS.
            _log.warning("message %s: dead letter too large, written without reason and history", message.message_id)
            entry = encode(msgspec.structs.replace(outgoing, headers=message.headers), fifo=is_fifo(self._dlq_name))
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                url = await self._client.url_of(self._dlq_name, declare=self._settings.declare_dlq)
                await self._client.call("send_message", QueueUrl=url, **entry)
        except TimeoutError as exc:
            raise self._client.translate(exc) from None
        await self.ack(message)

    def owns(self, message: RawMessage) -> bool:
        item = self._in_flight.get(message)
        if item is not None and self._is_expired(item):
            self._lose(item)
            return False
        return item is not None

    async def pause(self) -> None:
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self._wakeup.set()
        self._has_capacity.set()

    async def lag(self) -> int | None:
        """Number of messages that are not in flight, as SQS estimates it."""
        name = "ApproximateNumberOfMessages"
        try:
            async with asyncio.timeout(_HEALTH_S):
                return int((await self._attributes(name))[name])
        except (BrokerUnavailable, TimeoutError):
            return None

    async def health_check(self) -> bool:
        return await self.lag() is not None

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for event in (self._wakeup, self._has_capacity, self._closing):
            event.set()
        # An abandoned request may still receive messages, which then stay invisible for a while.
        if self._receivers:
            timeout_s = _CLOSE_POLLS_S if self._settings.wait_time_s else self._settings.timeout_s
            await asyncio.wait(self._receivers, timeout=timeout_s)
        await _end(self._receivers)
        for message in list(self._in_flight):
            self._settle(message, 0)
        self._all_settled = True
        self._work.set()
        writers = self._tasks[1:]
        if writers:
            await asyncio.wait(writers, timeout=self._settings.timeout_s)
        await _end(self._tasks)
        await self._client.close()

    # Receiving -------------------------------------------------------------------------------------

    async def _receive(self, *, first: bool) -> None:
        """Receive messages until `close`. On an idle queue only the first task polls; on a busy one all do."""
        backoff = Backoff()
        while not self._closed:
            count = min(BATCH, self._free())
            if count < 1 or self._paused or not (first or self._has_more):
                self._has_capacity.clear()
                await self._has_capacity.wait()
                continue
            self._requested += count
            try:
                received = await self._request(count)
                self._add_received(received, count)
                if backoff.failures:
                    _log.info("SQS at %s, queue %s: recovered", self._settings.address, self.queue_name)
                    backoff.reset()
                if not received and not self._settings.wait_time_s:
                    await self._pause_for(_SHORT_POLL_S)
            except BrokerUnavailable as exc:
                if not backoff.failures:
                    _log.warning("%s; retrying", exc)
                await self._pause_for(backoff.next_s())
            finally:
                self._requested -= count

    async def _pause_for(self, seconds: float) -> None:
        """Wait for some seconds, or until `close`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    async def _request(self, count: int) -> list[dict[str, Any]]:
        answer = await self._client.call(
            "receive_message",
            QueueUrl=self._url,
            MaxNumberOfMessages=count,
            WaitTimeSeconds=self._settings.wait_time_s,
            VisibilityTimeout=self._settings.visibility_timeout_s,
            MessageAttributeNames=["All"],
            AttributeNames=["SentTimestamp", "ApproximateReceiveCount", "MessageGroupId"],
        )
        received: list[dict[str, Any]] = answer.get("Messages", [])
        return received

    def _add_received(self, received: Iterable[dict[str, Any]], requested: int) -> None:
        fresh = [decode(each, self.queue_name) for each in received]
        now = self._now()
        for message in fresh:
            self._in_flight[message] = _ReceivedMessage(message, message.metadata["receipt_handle"], now)
        self._arrived.extend(fresh)
        self._has_more = len(fresh) == requested
        self._wakeup.set()
        if self._has_more:
            self._has_capacity.set()

    def _free(self) -> int:
        if len(self._settled) > _MOST_SETTLED:
            return 0
        return self._prefetch - len(self._in_flight) - self._requested

    # Settling --------------------------------------------------------------------------------------

    def _settle(self, message: RawMessage, visible_in_s: int | None) -> None:
        owned = self.owns(message)
        item = self._release(message)
        if item is not None and owned:
            item.visible_in_s = visible_in_s
            self._settled.append(item)
            self._work.set()

    def _release(self, message: RawMessage) -> _ReceivedMessage | None:
        item = self._in_flight.pop(message, None)
        self._has_capacity.set()
        return item

    def _lose(self, lost: _ReceivedMessage) -> None:
        """Drop an expired message.

        Others of its FIFO group are returned to the queue, so that they do not overtake it.
        """
        key = lost.message.key
        lost_group = (
            [item for item in self._in_flight.values() if item.message.key == key] if self._is_fifo and key else [lost]
        )
        _log.warning("visibility of message %s of %s expired", lost.message.message_id, self.queue_name)
        for item in lost_group:
            self._release(item.message)
            if not self._is_expired(item):
                item.visible_in_s = 0
                self._settled.append(item)
                self._work.set()

    async def _write_settled(self) -> None:
        """Send settled messages to SQS, ten at a time. What is not sent in time is delivered again."""
        backoff = Backoff()
        while True:
            if not self._settled:
                if self._all_settled:
                    return
                self._work.clear()
                await self._work.wait()
                # Include messages settled in the same iteration of the event loop.
                await asyncio.sleep(0)
                continue
            batch = self._next_settled()
            try:
                await self._send_settled(batch)
                backoff.reset()
            except BrokerUnavailable as exc:
                if self._closed:
                    return
                _log.warning("%s; %d settled messages pending", exc, len(batch))
                self._settled.extendleft(item for item in reversed(batch) if not self._is_expired(item))
                await asyncio.sleep(backoff.next_s())

    def _next_settled(self) -> list[_ReceivedMessage]:
        """The next batch of messages that are settled in the same way."""
        kind = self._settled[0].visible_in_s
        batch: list[_ReceivedMessage] = []
        while self._settled and len(batch) < BATCH and self._settled[0].visible_in_s == kind:
            batch.append(self._settled.popleft())
        return batch

    async def _send_settled(self, batch: Sequence[_ReceivedMessage]) -> None:
        entries: list[dict[str, Any]] = [{"Id": str(n), "ReceiptHandle": item.handle} for n, item in enumerate(batch)]
        visible_in_s = batch[0].visible_in_s
        if visible_in_s is None:
            answer = await self._client.call("delete_message_batch", QueueUrl=self._url, Entries=entries)
        else:
            answer = await self._change_visibility(entries, visible_in_s)
        for failed in answer.get("Failed", []):
            item = batch[int(failed["Id"])]
            if not failed.get("SenderFault") and not self._is_expired(item):
                self._settled.append(item)

    def _is_expired(self, item: _ReceivedMessage) -> bool:
        return self._now() >= item.prolonged_at + self._settings.visibility_timeout_s

    # Holding ---------------------------------------------------------------------------------------

    async def _prolong(self) -> None:
        """Extend the visibility of messages in flight every third of the timeout."""
        third = self._settings.visibility_timeout_s / 3
        while True:
            await asyncio.sleep(third / 4)
            for item in list(self._in_flight.values()):
                if item.message in self._in_flight and self._is_expired(item):
                    self._lose(item)
            due = [item for item in self._in_flight.values() if self._now() - item.prolonged_at >= third * 0.75]
            batches = [due[start : start + BATCH] for start in range(0, len(due), BATCH)]
            for some in range(0, len(batches), _WRITERS):
                await asyncio.gather(*map(self._prolong_batch, batches[some : some + _WRITERS]))

    async def _prolong_batch(self, batch: Sequence[_ReceivedMessage]) -> None:
        entries: list[dict[str, Any]] = [{"Id": str(n), "ReceiptHandle": item.handle} for n, item in enumerate(batch)]
        # Counted from before the request: SQS may have applied it immediately.
        now = self._now()
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                answer = await self._change_visibility(entries, self._settings.visibility_timeout_s)
        except (BrokerUnavailable, TimeoutError) as exc:
            _log.warning("%s; visibility of %d messages not extended", str(exc) or "no answer", len(batch))
            return
        refused = {int(failed["Id"]) for failed in answer.get("Failed", []) if failed.get("SenderFault")}
        later = {int(failed["Id"]) for failed in answer.get("Failed", [])} - refused
        for n, item in enumerate(batch):
            if item.message not in self._in_flight:
                continue
            if n in refused or self._is_expired(item):
                # Even if SQS extended it: it was expired for a moment, and a caller of `owns` may have abandoned it.
                self._lose(item)
            elif n not in later:
                item.prolonged_at = now

    async def _change_visibility(self, entries: list[dict[str, Any]], seconds: int) -> dict[str, Any]:
        with_time = [{**entry, "VisibilityTimeout": seconds} for entry in entries]
        return await self._client.call("change_message_visibility_batch", QueueUrl=self._url, Entries=with_time)

    async def _attributes(self, *names: str) -> dict[str, str]:
        answer = await self._client.call("get_queue_attributes", QueueUrl=self._url, AttributeNames=list(names))
        found: dict[str, str] = answer.get("Attributes", {})
        return found

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
