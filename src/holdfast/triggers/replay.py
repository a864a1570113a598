"""Replay the dead letters of a trigger: publish the original messages to its queue again.

Delivery is at least once: a dead letter is acknowledged after the broker confirmed the message in the source queue. If
the process is killed in between, the message is published twice. The trigger detects that by `x-replay-of`, the id of
the original message, which serves as dedup key if the message has none. The key was released when the message failed,
so the replay itself runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, Final
from uuid import uuid4

from holdfast.brokers.factory import build_adapter, build_publisher, dead_letter_queue
from holdfast.brokers.port import (
    DEAD_HEADERS,
    DEAD_MESSAGE_ID,
    DEAD_REASON,
    DEAD_SOURCE,
    OutgoingMessage,
    Publisher,
    QueueAdapter,
    RawMessage,
)
from holdfast.errors import BrokerUnavailable, InvalidOption
from holdfast.observe.redact import redact_and_truncate
from holdfast.operations.bulk import DEFAULT_RATE, BulkReport, BulkResult, Progress, no_progress
from holdfast.triggers.config import TriggerEntry
from holdfast.triggers.envelope import REPLAY_OF
from holdfast.triggers.state import REASON_LIMIT

#: Header with the id of the replay: messages that are dead-lettered again while it runs are left for the next one.
REPLAY_ID: Final = "x-replay-id"
#: After this time without a message, check the lag.
_QUIET_S: Final = 1.0
#: How long to wait for dead letters that the broker counts but does not deliver: a killed member of the group keeps
#: them until its session ends.
_STALL_S: Final = 60.0
#: A client that has just connected may not know the lag yet.
_COUNT_TRIES: Final = 20
#: How long the first message of a batch waits for others.
_LINGER_S: Final = 0.05
#: Maximum batch size.
_MAX_BATCH: Final = 50
_BATCHES_PER_S: Final = 20
_PREFETCH: Final = 1_000
_ANY_SIZE: Final = 1_000_000_000

#: Overrides of the trigger's connection: read all dead letters from the first, publish directly to the source queue
#: without a size limit, and do not create queues.
_CONNECTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "kafka": {"start_at": "earliest", "max_message_bytes": _ANY_SIZE},
    "rabbitmq": {"exchange": "", "declare": False, "max_message_bytes": _ANY_SIZE},
    "sqs": {"declare": False},
    "redis": {"max_length": None},
}
#: Brokers where every group reads all messages: acknowledging a dead letter of another queue does not remove it for
#: the trigger of that queue.
_EACH_GROUP_READS_ALL: Final = frozenset({"kafka", "memory"})


async def replay_dead_letters(
    entry: TriggerEntry,
    *,
    limit: int | None = None,
    rate_per_s: float = DEFAULT_RATE,
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> BulkReport:
    """Publish dead letters to the trigger's queue, the oldest first. Raises `BrokerUnavailable`.

    `dry_run` only counts. The count may leave out messages that are still in flight to a killed replay. A message that
    cannot be published ends the replay; the next call continues there.
    """
    if limit is not None and limit < 1:
        raise InvalidOption(f"limit must be at least 1, not {limit}")
    if not rate_per_s > 0:
        raise InvalidOption(f"rate must be greater than 0 per second, not {rate_per_s:g}")
    kind = entry.adapter.type
    connection = entry.adapter.connection.model_copy(update=dict(_CONNECTIONS.get(kind, {})))
    queue = dead_letter_queue(kind, entry.queue_name, entry.dlq_name)
    group = f"{entry.consumer_group}.{entry.queue_name}.replay"
    async with AsyncExitStack() as stack:
        # No more than needed: brokers count deliveries, and some drop messages delivered too often.
        prefetch = min(limit or _PREFETCH, _PREFETCH)
        adapter = build_adapter(kind, connection, queue, group, prefetch)
        stack.push_async_callback(adapter.close)
        await adapter.connect()
        matched = await _count(adapter, limit)
        if dry_run:
            return BulkReport(matched=matched, dry_run=True)
        publisher = build_publisher(kind, connection)
        stack.push_async_callback(publisher.close)
        await publisher.connect()
        run = _Replay(entry, adapter, publisher, prefetch, limit, rate_per_s, progress)
        return await run.run(matched)


async def _count(adapter: QueueAdapter, limit: int | None) -> int:
    """Number of waiting dead letters, at most `limit`; 0 if the broker does not report it."""
    waiting = await adapter.lag()
    for _ in range(_COUNT_TRIES):
        if waiting is None:
            await asyncio.sleep(_QUIET_S / 4)
            waiting = await adapter.lag()
    waiting = waiting or 0
    return waiting if limit is None else min(waiting, limit)


class _Replay:
    """One replay. The caller connects and closes the clients; unacknowledged messages stay dead letters."""

    def __init__(
        self,
        entry: TriggerEntry,
        adapter: QueueAdapter,
        publisher: Publisher,
        prefetch: int,
        limit: int | None,
        rate_per_s: float,
        progress: Progress,
    ) -> None:
        self._id = uuid4().hex
        self._source = entry.queue_name
        self._passes_others = entry.adapter.type in _EACH_GROUP_READS_ALL
        self._adapter = adapter
        self._publisher = publisher
        self._left = limit
        self._prefetch = prefetch
        self._rate_per_s = rate_per_s
        self._progress = progress
        self._results: list[BulkResult] = []
        #: Dead letters of other queues, or dead-lettered again by this replay: not acknowledged.
        self._skipped = 0
        #: Kafka partitions where a dead letter was skipped: a commit cannot pass it.
        self._closed_partitions: set[int] = set()
        self._stopped = ""

    async def run(self, matched: int) -> BulkReport:
        due = time.monotonic()
        async with aclosing(self._batches()) as batches:
            async for batch in batches:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                due = max(due, time.monotonic() - 1.0) + len(batch) / self._rate_per_s
                await self._publish(batch)
                if self._stopped or self._left == 0:
                    break
        return BulkReport(matched=matched, dry_run=False, results=self._results, stopped=self._stopped)

    async def _batches(self) -> AsyncGenerator[list[RawMessage], None]:
        size = max(1, min(_MAX_BATCH, int(self._rate_per_s / _BATCHES_PER_S)))
        messages = self._adapter.consume()
        batch: list[RawMessage] = []
        last_at = time.monotonic()
        coming = asyncio.ensure_future(anext(messages))
        try:
            while True:
                await asyncio.wait({coming}, timeout=_LINGER_S if batch else _QUIET_S)
                if coming.done():
                    message, last_at = coming.result(), time.monotonic()
                    coming = asyncio.ensure_future(anext(messages))
                    if await self._is_selected(message):
                        batch.append(message)
                    if len(batch) < (size if self._left is None else min(size, self._left)):
                        continue
                elif not batch:
                    if await self._is_drained(last_at):
                        return
                    continue
                yield batch
                batch = []
        finally:
            coming.cancel()
            await asyncio.wait({coming})

    async def _is_selected(self, message: RawMessage) -> bool:
        partition = message.metadata.get("partition")
        failed_again = message.headers.get(REPLAY_ID) == self._id
        is_own = message.headers.get(DEAD_SOURCE, self._source) == self._source
        if partition in self._closed_partitions or (is_own and failed_again):
            self._skip(message, partition, failed_again)
        elif is_own:
            return True
        elif self._passes_others:
            await self._adapter.ack(message)
        else:
            self._skip(message, partition, failed_again)
        return False

    def _skip(self, message: RawMessage, partition: int | None, failed_again: bool) -> None:
        """Leave the message in the dead-letter queue."""
        self._skipped += 1
        if partition is not None:
            self._closed_partitions.add(partition)
        if failed_again:
            reason = redact_and_truncate(message.headers.get(DEAD_REASON, ""), REASON_LIMIT)
            self._note(BulkResult(id=_original_id(message), done=False, code="FAILED_AGAIN", message=reason))

    async def _is_drained(self, last_at: float) -> bool:
        if self._skipped >= self._prefetch:
            self._stopped = f"{self._skipped} dead letters of other queues, or dead-lettered again, block the rest"
        if self._skipped:
            return True
        waiting = await self._adapter.lag()
        if not waiting:
            return True
        if time.monotonic() - last_at > _STALL_S:
            self._stopped = f"{waiting} dead letters are waiting, but the broker delivers none"
            return True
        return False

    async def _publish(self, batch: Sequence[RawMessage]) -> None:
        owned = [message for message in batch if self._adapter.owns(message)]
        answers = await self._publisher.publish([self._restore(message) for message in owned])
        for message, failure in zip(owned, answers, strict=True):
            message_id = _original_id(message)
            if failure is None:
                await self._adapter.ack(message)
                if self._left is not None:
                    self._left -= 1
            else:
                self._stopped = self._stopped or str(failure)
            self._note(_result(message_id, failure))

    def _note(self, result: BulkResult) -> None:
        self._results.append(result)
        self._progress(result)

    def _restore(self, message: RawMessage) -> OutgoingMessage:
        headers = {name: value for name, value in message.headers.items() if name not in DEAD_HEADERS}
        headers |= {REPLAY_OF: _original_id(message), REPLAY_ID: self._id}
        # Not the original id: SQS would drop the replay as a duplicate.
        message_id = hashlib.sha256(f"replay {message.message_id}".encode()).hexdigest()[:32]
        return OutgoingMessage(self._source, message.body, headers, message.key, message_id)


def _original_id(message: RawMessage) -> str:
    """Id of the original message, also after several replays."""
    return message.headers.get(REPLAY_OF) or message.headers.get(DEAD_MESSAGE_ID) or message.message_id


def _result(message_id: str, failure: BrokerUnavailable | None) -> BulkResult:
    if failure is None:
        return BulkResult(id=message_id, done=True)
    return BulkResult(id=message_id, done=False, code=failure.code, message=str(failure))
