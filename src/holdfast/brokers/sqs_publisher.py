"""SQS publisher: batches of ten, in order per topic and key."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

from holdfast.brokers.port import OutgoingMessage, Publisher
from holdfast.brokers.sqs_connection import BATCH, SqsClient, SqsConfig, check_size, encode, is_fifo, size_of
from holdfast.errors import BrokerRefused, BrokerUnavailable

_log: Final = logging.getLogger("holdfast.brokers.sqs")

_HEALTH_S: Final = 3.0
#: Concurrent batches.
_WRITERS: Final = 4


class SqsPublisher(Publisher):
    """Publishes in batches of ten, up to `_WRITERS` at a time. The topic is the name of the queue.

    One message per topic and key is in flight at a time: SQS may refuse one message of a batch and accept the next.
    """

    def __init__(self, connection: SqsConfig) -> None:
        self._settings = connection
        self._client = SqsClient(connection)

    async def connect(self) -> None:
        if not self._client.is_open:
            await self._client.open()
        try:
            await self._probe()
        except BaseException:
            await self.close()
            raise

    async def publish(self, messages: Sequence[OutgoingMessage]) -> list[BrokerUnavailable | None]:
        answers: list[BrokerUnavailable | None] = [BrokerUnavailable("SQS did not confirm in time") for _ in messages]
        lanes: dict[tuple[str, ...], deque[int]] = {}
        for index, message in enumerate(messages):
            lane = (message.topic, message.key) if message.key else (str(index),)
            lanes.setdefault(lane, deque()).append(index)
        try:
            async with asyncio.timeout(self._settings.timeout_s * 2):
                while lanes:
                    await self._publish_heads(messages, [lane[0] for lane in lanes.values()], answers)
                    lanes = self._next(lanes, answers)
        except TimeoutError:
            _log.warning("SQS at %s did not confirm in time", self._settings.address)
        return answers

    async def health_check(self) -> bool:
        try:
            async with asyncio.timeout(_HEALTH_S):
                await self._probe()
        except (BrokerUnavailable, TimeoutError):
            return False
        return True

    async def close(self) -> None:
        await self._client.close()

    async def _probe(self) -> None:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._client.call("list_queues", MaxResults=1)
        except TimeoutError as exc:
            raise self._client.translate(exc) from None

    @staticmethod
    def _next(
        lanes: dict[tuple[str, ...], deque[int]], answers: list[BrokerUnavailable | None]
    ) -> dict[tuple[str, ...], deque[int]]:
        """Return the lanes without their heads. The rest of a lane whose head failed fails too."""
        left = {}
        for name, lane in lanes.items():
            failed = answers[lane.popleft()]
            if failed is not None:
                for index in lane:
                    answers[index] = failed
            elif lane:
                left[name] = lane
        return left

    async def _publish_heads(
        self, messages: Sequence[OutgoingMessage], indices: Iterable[int], answers: list[BrokerUnavailable | None]
    ) -> None:
        by_topic: dict[str, list[int]] = {}
        for index in indices:
            by_topic.setdefault(messages[index].topic, []).append(index)
        slots = asyncio.Semaphore(_WRITERS)

        async def send(topic: str, batch: dict[int, dict[str, Any]]) -> None:
            async with slots:
                await self._send(topic, batch, answers)

        await asyncio.gather(
            *(
                send(topic, batch)
                for topic, some in by_topic.items()
                for batch in self._batches(messages, some, answers)
            )
        )

    def _batches(
        self, messages: Sequence[OutgoingMessage], indices: Iterable[int], answers: list[BrokerUnavailable | None]
    ) -> list[dict[int, dict[str, Any]]]:
        """Batches of at most ten entries that together do not exceed the size limit of a message."""
        batches: list[dict[int, dict[str, Any]]] = []
        bytes_left = 0
        for index in indices:
            try:
                entry = encode(messages[index], fifo=is_fifo(messages[index].topic))
                check_size(entry, self._settings.max_message_bytes)
            except BrokerRefused as exc:
                answers[index] = exc
                continue
            if not batches or len(batches[-1]) == BATCH or size_of(entry) > bytes_left:
                batches.append({})
                bytes_left = self._settings.max_message_bytes
            batches[-1][index] = entry
            bytes_left -= size_of(entry)
        return batches

    async def _send(
        self, topic: str, batch: dict[int, dict[str, Any]], answers: list[BrokerUnavailable | None]
    ) -> None:
        entries = [{"Id": str(index), **entry} for index, entry in batch.items()]
        try:
            url = await self._client.url_of(topic, declare=self._settings.declare)
            answer = await self._client.call("send_message_batch", QueueUrl=url, Entries=entries)
        except BrokerUnavailable as exc:
            if isinstance(exc, BrokerRefused) and len(batch) > 1:
                # One invalid entry makes SQS refuse the whole batch: send each alone.
                for index, entry in batch.items():
                    await self._send(topic, {index: entry}, answers)
                return
            for index in batch:
                answers[index] = exc
            return
        for sent in answer.get("Successful", []):
            answers[int(sent["Id"])] = None
        for failed in answer.get("Failed", []):
            kind = BrokerRefused if failed.get("SenderFault") else BrokerUnavailable
            text = f"SQS at {self._settings.address}: {failed.get('Code')}: {failed.get('Message', '')}"
            answers[int(failed["Id"])] = kind(text)
