"""SQS, by aiobotocore: long polls, batches of ten, visibility prolonged while a message is in hand.

Consumers of a queue share its messages, so a consumer group is the queue itself. Order per key is kept by FIFO queues
(the key is the message's group); a standard queue promises none.

A message is ours until its visibility ends, by our own clock: whoever cannot prolong it in time has lost it, for good,
and with it what else of its key is in hand, which must not go before it. Deletions are sent together; one that does not
arrive means that the message comes once more.
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
#: For so long an end waits for the answers to long questions.
_FAREWELL_S: Final = 0.3
#: Between two questions that SQS answers at once, though it has nothing.
_SHORT_POLL_S: Final = 0.05
#: Requests with settled messages at the same time.
_WRITERS: Final = 4
#: With so many settled messages unsent no more are asked for.
_MOST_SETTLED: Final = 1_000


@dataclass(slots=True, eq=False)
class _ReceivedMessage:
    """A message in hand."""

    message: RawMessage
    handle: str
    #: By the event loop's clock.
    prolonged_at: float
    #: What SQS is to be told: None: delete it, else: seconds until it is visible again.
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
        #: Whether SQS itself puts away what comes too often.
        self._has_redrive = False
        self._in_hand: dict[RawMessage, _ReceivedMessage] = {}
        self._arrived: deque[RawMessage] = deque()
        self._settled: deque[_ReceivedMessage] = deque()
        #: How many messages the questions under way may bring.
        self._asked_for = 0
        #: The last answer was a full one: there are more.
        self._many = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._work = asyncio.Event()
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._receivers: list[asyncio.Task[None]] = []
        self._paused = False
        self._closed = False
        #: Nothing will be settled any more.
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
            raise BrokerUnavailable("closed while it was connecting")
        writers = [self._write_settled() for _ in range(_WRITERS)]
        self._tasks = [asyncio.create_task(work) for work in (self._prolong(), *writers)]

    async def consume(self) -> AsyncIterator[RawMessage]:
        if not self._client.is_open and not self._closed:
            raise BrokerUnavailable("not connected yet: call connect() first")
        if not self._receivers and not self._closed:
            count = min(self._settings.receives, -(-self._prefetch // BATCH))
            self._receivers = [asyncio.create_task(self._receive(first=n == 0)) for n in range(count)]
        while not self._closed:
            self._news.clear()
            if self._arrived and not self._paused:
                message = self._arrived.popleft()
                if self.owns(message):
                    yield message
            else:
                await self._news.wait()

    async def ack(self, message: RawMessage) -> None:
        self._settle(message, None)

    async def nack(self, message: RawMessage, requeue: bool = False) -> None:
        """Without `requeue`: left to the queue's redrive policy, which counts how often it came; if there is none,
        it is deleted."""
        if requeue:
            self._settle(message, 0)
        elif self._has_redrive:
            self._forget(message)
        else:
            self._settle(message, None)

    async def send_to_dlq(self, message: RawMessage, reason: str, history: Sequence[str] = ()) -> None:
        if not self.owns(message):
            return
        letter = dead_letter(message, self._dlq_name, self.queue_name, reason, history)
        entry = encode(letter, fifo=is_fifo(self._dlq_name))
        if size_of(entry) > self._settings.max_message_bytes:
            # The message itself has been with SQS before, so it fits.
            _log.warning("message %s has no room for what there is to say of it", message.message_id)
            entry = encode(msgspec.structs.replace(letter, headers=message.headers), fifo=is_fifo(self._dlq_name))
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                url = await self._client.url_of(self._dlq_name, declare=self._settings.declare_dlq)
                await self._client.call("send_message", QueueUrl=url, **entry)
        except TimeoutError as exc:
            raise self._client.translate(exc) from None
        await self.ack(message)

    def owns(self, message: RawMessage) -> bool:
        held = self._in_hand.get(message)
        if held is not None and self._is_over(held):
            self._lose(held)
            return False
        return held is not None

    async def pause(self) -> None:
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self._news.set()
        self._room.set()

    async def lag(self) -> int | None:
        """Messages that nobody has in hand, as SQS estimates it."""
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
        for event in (self._news, self._room, self._over):
            event.set()
        # A question that is given up may still be answered, to nobody, and what it brings is hidden for a while.
        if self._receivers:
            patience_s = _FAREWELL_S if self._settings.wait_time_s else self._settings.timeout_s
            await asyncio.wait(self._receivers, timeout=patience_s)
        await _end(self._receivers)
        for message in list(self._in_hand):
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
        """Ask for messages, for ever. On a quiet queue one asks; on a busy one all do."""
        backoff = Backoff()
        while not self._closed:
            count = min(BATCH, self._free())
            if count < 1 or self._paused or not (first or self._many):
                self._room.clear()
                await self._room.wait()
                continue
            self._asked_for += count
            try:
                received = await self._ask(count)
                self._take(received, count)
                if backoff.failures:
                    _log.info("SQS at %s, queue %s: back", self._settings.address, self.queue_name)
                    backoff.reset()
                if not received and not self._settings.wait_time_s:
                    await self._rest(_SHORT_POLL_S)
            except BrokerUnavailable as exc:
                if not backoff.failures:
                    _log.warning("%s; trying on", exc)
                await self._rest(backoff.next_s())
            finally:
                self._asked_for -= count

    async def _rest(self, seconds: float) -> None:
        """Until it is time to ask again, or to end."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    async def _ask(self, count: int) -> list[dict[str, Any]]:
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

    def _take(self, received: Iterable[dict[str, Any]], asked_for: int) -> None:
        fresh = [decode(each, self.queue_name) for each in received]
        now = self._now()
        for message in fresh:
            self._in_hand[message] = _ReceivedMessage(message, message.metadata["receipt_handle"], now)
        self._arrived.extend(fresh)
        self._many = len(fresh) == asked_for
        self._news.set()
        if self._many:
            self._room.set()

    def _free(self) -> int:
        if len(self._settled) > _MOST_SETTLED:
            return 0
        return self._prefetch - len(self._in_hand) - self._asked_for

    # Settling --------------------------------------------------------------------------------------

    def _settle(self, message: RawMessage, visible_in_s: int | None) -> None:
        ours = self.owns(message)
        held = self._forget(message)
        if held is not None and ours:
            held.visible_in_s = visible_in_s
            self._settled.append(held)
            self._work.set()

    def _forget(self, message: RawMessage) -> _ReceivedMessage | None:
        held = self._in_hand.pop(message, None)
        self._room.set()
        return held

    def _lose(self, lost: _ReceivedMessage) -> None:
        """It will be delivered again, and what comes after it in its group will be, too: not before it."""
        key = lost.message.key
        line = [held for held in self._in_hand.values() if held.message.key == key] if self._is_fifo and key else [lost]
        _log.warning("message %s of %s was not prolonged in time", lost.message.message_id, self.queue_name)
        for held in line:
            self._forget(held.message)
            if not self._is_over(held):
                held.visible_in_s = 0
                self._settled.append(held)
                self._work.set()

    async def _write_settled(self) -> None:
        """Tell SQS what was settled, ten at a time. What it does not hear in time comes once more."""
        backoff = Backoff()
        while True:
            if not self._settled:
                if self._all_settled:
                    return
                self._work.clear()
                await self._work.wait()
                # What else is settled in this turn of the loop goes along.
                await asyncio.sleep(0)
                continue
            batch = self._next_settled()
            try:
                await self._tell(batch)
                backoff.reset()
            except BrokerUnavailable as exc:
                if self._closed:
                    return
                _log.warning("%s; %d settled messages wait", exc, len(batch))
                self._settled.extendleft(held for held in reversed(batch) if not self._is_over(held))
                await asyncio.sleep(backoff.next_s())

    def _next_settled(self) -> list[_ReceivedMessage]:
        """The first and those after it that are to be told in the same way."""
        kind = self._settled[0].visible_in_s
        batch: list[_ReceivedMessage] = []
        while self._settled and len(batch) < BATCH and self._settled[0].visible_in_s == kind:
            batch.append(self._settled.popleft())
        return batch

    async def _tell(self, batch: Sequence[_ReceivedMessage]) -> None:
        entries: list[dict[str, Any]] = [{"Id": str(n), "ReceiptHandle": held.handle} for n, held in enumerate(batch)]
        visible_in_s = batch[0].visible_in_s
        if visible_in_s is None:
            answer = await self._client.call("delete_message_batch", QueueUrl=self._url, Entries=entries)
        else:
            answer = await self._change_visibility(entries, visible_in_s)
        for failed in answer.get("Failed", []):
            held = batch[int(failed["Id"])]
            if not failed.get("SenderFault") and not self._is_over(held):
                self._settled.append(held)

    def _is_over(self, held: _ReceivedMessage) -> bool:
        return self._now() >= held.prolonged_at + self._settings.visibility_timeout_s

    # Holding ---------------------------------------------------------------------------------------

    async def _prolong(self) -> None:
        """Keep what is in hand invisible to others: at each third of the time that it has."""
        third = self._settings.visibility_timeout_s / 3
        while True:
            await asyncio.sleep(third / 4)
            for held in list(self._in_hand.values()):
                if held.message in self._in_hand and self._is_over(held):
                    self._lose(held)
            due = [held for held in self._in_hand.values() if self._now() - held.prolonged_at >= third * 0.75]
            batches = [due[start : start + BATCH] for start in range(0, len(due), BATCH)]
            for some in range(0, len(batches), _WRITERS):
                await asyncio.gather(*map(self._prolong_batch, batches[some : some + _WRITERS]))

    async def _prolong_batch(self, batch: Sequence[_ReceivedMessage]) -> None:
        entries: list[dict[str, Any]] = [{"Id": str(n), "ReceiptHandle": held.handle} for n, held in enumerate(batch)]
        # Counted from when it was asked for: SQS may have heard it at once.
        now = self._now()
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                answer = await self._change_visibility(entries, self._settings.visibility_timeout_s)
        except (BrokerUnavailable, TimeoutError) as exc:
            _log.warning("%s; %d messages in hand are not prolonged", str(exc) or "no answer", len(batch))
            return
        refused = {int(failed["Id"]) for failed in answer.get("Failed", []) if failed.get("SenderFault")}
        later = {int(failed["Id"]) for failed in answer.get("Failed", [])} - refused
        for n, held in enumerate(batch):
            if held.message not in self._in_hand:
                continue
            if n in refused or self._is_over(held):
                # Also if SQS has prolonged it: it was not ours for a moment, and whoever asked then has dropped it.
                self._lose(held)
            elif n not in later:
                held.prolonged_at = now

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
