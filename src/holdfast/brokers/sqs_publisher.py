"""The publishing end of SQS."""

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
#: Batches under way at the same time.
_WRITERS: Final = 4


class SqsPublisher(Publisher):
    """Writes batches of ten, a few at a time. The topic is the queue's name.

    Of one topic and key one message is under way at a time: SQS takes or refuses each message of a batch by itself.
    """

    def __init__(self, connection: SqsConfig) -> None:
        self._settings = connection
        self._client = SqsClient(connection)

    async def connect(self) -> None:
        if not self._client.is_open:
            await self._client.open()
        try:
            await self._ask()
        except BaseException:
            await self.close()
            raise

    async def publish(self, messages: Sequence[OutgoingMessage]) -> list[BrokerUnavailable | None]:
        answers: list[BrokerUnavailable | None] = [BrokerUnavailable("SQS did not confirm in time") for _ in messages]
        lanes: dict[tuple[str, ...], deque[int]] = {}
        for place, message in enumerate(messages):
            lane = (message.topic, message.key) if message.key else (str(place),)
            lanes.setdefault(lane, deque()).append(place)
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
                await self._ask()
        except (BrokerUnavailable, TimeoutError):
            return False
        return True

    async def close(self) -> None:
        await self._client.close()

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._client.call("list_queues", MaxResults=1)
        except TimeoutError as exc:
            raise self._client.translate(exc) from None

    @staticmethod
    def _next(
        lanes: dict[tuple[str, ...], deque[int]], answers: list[BrokerUnavailable | None]
    ) -> dict[tuple[str, ...], deque[int]]:
        """What is left after the heads of all lanes: nothing of a lane whose head failed."""
        left = {}
        for name, lane in lanes.items():
            failed = answers[lane.popleft()]
            if failed is not None:
                for place in lane:
                    answers[place] = failed
            elif lane:
                left[name] = lane
        return left

    async def _publish_heads(
        self, messages: Sequence[OutgoingMessage], places: Iterable[int], answers: list[BrokerUnavailable | None]
    ) -> None:
        by_topic: dict[str, list[int]] = {}
        for place in places:
            by_topic.setdefault(messages[place].topic, []).append(place)
        gate = asyncio.Semaphore(_WRITERS)

        async def send(topic: str, batch: dict[int, dict[str, Any]]) -> None:
            async with gate:
                await self._send(topic, batch, answers)

        await asyncio.gather(
            *(
                send(topic, batch)
                for topic, some in by_topic.items()
                for batch in self._batches(messages, some, answers)
            )
        )

    def _batches(
        self, messages: Sequence[OutgoingMessage], places: Iterable[int], answers: list[BrokerUnavailable | None]
    ) -> list[dict[int, dict[str, Any]]]:
        """At most ten, and no more bytes than one message may have."""
        batches: list[dict[int, dict[str, Any]]] = []
        room = 0
        for place in places:
            try:
                entry = encode(messages[place], fifo=is_fifo(messages[place].topic))
                check_size(entry, self._settings.max_message_bytes)
            except BrokerRefused as exc:
                answers[place] = exc
                continue
            if not batches or len(batches[-1]) == BATCH or size_of(entry) > room:
                batches.append({})
                room = self._settings.max_message_bytes
            batches[-1][place] = entry
            room -= size_of(entry)
        return batches

    async def _send(
        self, topic: str, batch: dict[int, dict[str, Any]], answers: list[BrokerUnavailable | None]
    ) -> None:
        entries = [{"Id": str(place), **entry} for place, entry in batch.items()]
        try:
            url = await self._client.url_of(topic, declare=self._settings.declare)
            answer = await self._client.call("send_message_batch", QueueUrl=url, Entries=entries)
        except BrokerUnavailable as exc:
            if isinstance(exc, BrokerRefused) and len(batch) > 1:
                # One that SQS cannot take makes it refuse all: ask for each.
                for place, entry in batch.items():
                    await self._send(topic, {place: entry}, answers)
                return
            for place in batch:
                answers[place] = exc
            return
        for sent in answer.get("Successful", []):
            answers[int(sent["Id"])] = None
        for failed in answer.get("Failed", []):
            kind = BrokerRefused if failed.get("SenderFault") else BrokerUnavailable
            text = f"SQS at {self._settings.address}: {failed.get('Code')}: {failed.get('Message', '')}"
            answers[int(failed["Id"])] = kind(text)
