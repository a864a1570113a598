"""The thread of a Kafka consumer. All calls of one consumer are made here because librdkafka blocks.

It polls continuously, also while paused or at the limit of messages in flight: its partitions are then paused and the
consumer stays a member of its group. Messages are passed to the event loop in batches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from operator import methodcaller
from threading import Event, Thread
from time import monotonic
from typing import Any, Final

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException, Message, TopicPartition

from holdfast.brokers.kafka.connection import ClientLog, KafkaConfig, client_settings
from holdfast.brokers.kafka.offsets import InFlightOffsets
from holdfast.brokers.port import UNREADABLE, RawMessage, timestamp_from_ms
from holdfast.core.retry import Backoff
from holdfast.observe.redact import redact

_log: Final = logging.getLogger("holdfast.brokers.kafka")

_COMMIT_EVERY_S: Final = 0.5
#: Messages per poll.
_BATCH: Final = 500
#: Wait for the first message of a poll. A pause, a commit or a stop is delayed by at most this time.
_POLL_S: Final = 0.1
#: Pausing discards prefetched messages, so a consumer at its limit waits this long before it pauses.
_FULL_FOR_S: Final = 0.25
#: Prefetched by the client, in addition to messages in flight.
_AHEAD_MESSAGES: Final = 10_000
_AHEAD_KILOBYTES: Final = 16_384
_NO_HEADERS: Final[dict[str, str]] = {}
#: Calls `Message.headers`. If a name is not UTF-8, the client sets an exception, and returns a broken list besides.
#: Python checks for that in this kind of call; in a direct one, once optimised, it does not, and the list crashes it.
_read_headers: Final = methodcaller("headers")


class Poller:
    """Consumer of one topic. `on_messages` is called in the event loop with each batch."""

    def __init__(
        self,
        connection: KafkaConfig,
        topic: str,
        group: str,
        offsets: InFlightOffsets,
        on_messages: Callable[[list[RawMessage]], None],
    ) -> None:
        self._connection = connection
        self._topic = topic
        self._group = group
        self._offsets = offsets
        self._on_messages = on_messages
        self._loop = asyncio.get_running_loop()
        self._thread = Thread(target=self._main, name=f"holdfast-kafka-{topic}", daemon=True)
        self._ending = Event()
        self._paused = False
        self._flowing = True
        self._failing = False
        self._commit_at = 0.0

    def start(self) -> None:
        self._thread.start()

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def stop(self, within_s: float) -> bool:
        """Commit what is done and leave the group. Returns whether that completed in time.

        If it did not, the thread ends later.
        """
        self._ending.set()
        self._offsets.wake()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    # Runs in the thread -----------------------------------------------------------------------------

    def _main(self) -> None:
        backoff = Backoff()
        while not self._ending.is_set():
            try:
                self._run_consumer(backoff)
            except Exception as exc:  # noqa: BLE001  (a thread that ended looks like an idle topic)
                if self._loop.is_closed():
                    _log.warning("consumer of %s stopped: its event loop is closed", self._topic)
                    return
                _log.warning("consumer of %s failed, restarting: %s", self._topic, redact(repr(exc)))
                self._ending.wait(backoff.next_s())

    def _run_consumer(self, backoff: Backoff) -> None:
        consumer = Consumer(self._settings(), logger=ClientLog())
        try:
            consumer.subscribe(
                [self._topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lose
            )
            while not self._ending.is_set():
                if self._poll_once(consumer):
                    backoff.reset()
            self._pass_markers(consumer)
        finally:
            # Messages in flight go to other members of the group; commit those that are done.
            self._commit_now(consumer, None)
            self._offsets.revoke()
            with suppress(KafkaException, RuntimeError):
                consumer.close()

    def _poll_once(self, consumer: Consumer) -> bool:
        free = 0 if self._paused else self._offsets.free_slots()
        if not free and self._flowing and not self._paused:
            self._commit_if_due(consumer)
            free = self._offsets.free_slots() if self._offsets.wait_for_capacity(_FULL_FOR_S) else 0
        self._set_flowing(consumer, free > 0)
        messages = consumer.consume(1, _POLL_S)
        if messages and free > 1:
            messages += consumer.consume(min(free, _BATCH) - 1, 0)
        if messages:
            self._deliver(messages)
        self._commit_if_due(consumer)
        return bool(messages)

    def _set_flowing(self, consumer: Consumer, flowing: bool) -> None:
        if flowing != self._flowing:
            self._flowing = flowing
            (consumer.resume if flowing else consumer.pause)(consumer.assignment())

    def _deliver(self, messages: list[Message]) -> None:
        batch = []
        for message in messages:
            error = message.error()
            if error is not None:
                self._on_error(error)
                continue
            share = self._offsets.add(message.partition() or 0, message.offset() or 0)
            if share is not None:
                batch.append(_raw(message, share))
        if batch:
            self._log_recovery()
            self._loop.call_soon_threadsafe(self._on_messages, batch)

    # Commits ----------------------------------------------------------------------------------------

    def _commit_if_due(self, consumer: Consumer) -> None:
        now = monotonic()
        if now < self._commit_at and not self._offsets.commit_is_due():
            return
        self._commit_at = now + _COMMIT_EVERY_S
        self._pass_markers(consumer)
        offsets = self._offsets.to_commit()
        if offsets:
            try:
                consumer.commit(offsets=self._topic_partitions(offsets), asynchronous=True)
            except KafkaException as exc:
                self._offsets.not_committed(offsets)
                _log.debug("commit of %s postponed: %s", self._topic, _text(exc.args[0]))

    def _commit_now(self, consumer: Consumer, partitions: Iterable[int] | None) -> None:
        offsets = self._offsets.to_commit(partitions)
        if offsets:
            try:
                consumer.commit(offsets=self._topic_partitions(offsets), asynchronous=False)
            except (KafkaException, RuntimeError) as exc:
                self._offsets.not_committed(offsets)
                _log.warning("last commit of %s failed, messages will repeat: %s", self._topic, redact(str(exc)))

    def _on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        failed = [at.partition for at in partitions if error is not None or at.error is not None]
        if failed:
            # The next round commits them again, if they are still assigned.
            self._offsets.not_committed(failed)
            _log.debug("commit of %s failed: %s", self._topic, _text(error or partitions[0].error))
        else:
            self._log_recovery()

    def _pass_markers(self, consumer: Consumer) -> None:
        """Advance past transaction markers, so that commits reach the end of the log.

        Otherwise monitors would report a lag. Call it only between two rounds: inside `consume`, where rebalances run,
        the client is ahead of `add`.
        """
        self._offsets.reach(self._positions(consumer, self._offsets.partitions()))

    def _positions(self, consumer: Consumer, partitions: Iterable[int]) -> dict[int, int]:
        """The client's next offset by partition, for partitions it has read from."""
        queried = [TopicPartition(self._topic, partition) for partition in partitions]
        if not queried:
            return {}
        try:
            found = consumer.position(queried)
        except (KafkaException, RuntimeError) as exc:
            _log.debug("positions in %s unknown: %s", self._topic, redact(str(exc)))
            return {}
        return {at.partition: at.offset for at in found if at.offset >= 0}

    def _topic_partitions(self, offsets: dict[int, int]) -> list[TopicPartition]:
        return [TopicPartition(self._topic, partition, offset) for partition, offset in offsets.items()]

    # Rebalances: called by `consume` ----------------------------------------------------------------

    def _on_assign(self, consumer: Consumer, assigned: list[TopicPartition]) -> None:
        partitions = [at.partition for at in assigned]
        self._offsets.assign(partitions, self._positions(consumer, partitions))
        cooperative = self._connection.assignment == "cooperative-sticky"
        (consumer.incremental_assign if cooperative else consumer.assign)(assigned)
        if assigned:
            # The client keeps a pause across assignments: a partition assigned again would deliver nothing.
            (consumer.resume if self._flowing else consumer.pause)(assigned)
        _log.info("consumer of %s, group %s: assigned partitions %s", self._topic, self._group, _numbers(assigned))

    def _on_revoke(self, consumer: Consumer, revoked: list[TopicPartition]) -> None:
        partitions = [at.partition for at in revoked]
        timeout_s = 0.0 if self._ending.is_set() else self._connection.revoke_wait_s
        left = self._offsets.wait_for_handovers(partitions, timeout_s)
        self._commit_now(consumer, partitions)
        self._offsets.revoke(partitions)
        _log.info(
            "consumer of %s, group %s: revoked partitions %s%s",
            self._topic,
            self._group,
            _numbers(revoked),
            f"; {left} messages were still being handled and will be redelivered" if left else "",
        )

    def _on_lose(self, _: Consumer, lost: list[TopicPartition]) -> None:
        self._offsets.revoke(at.partition for at in lost)
        _log.warning("consumer of %s, group %s: lost partitions %s", self._topic, self._group, _numbers(lost))

    # ------------------------------------------------------------------------------------------------

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            raise KafkaException(error)
        if not self._failing:
            self._failing = True
            _log.warning("consumer of %s failing, retrying: %s", self._topic, _text(error))

    def _log_recovery(self) -> None:
        if self._failing:
            self._failing = False
            _log.info("consumer of %s recovered", self._topic)

    def _settings(self) -> dict[str, Any]:
        connection = self._connection
        return {
            **client_settings(connection),
            "group.id": self._group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": connection.start_at,
            "partition.assignment.strategy": connection.assignment,
            "session.timeout.ms": int(connection.session_timeout_s * 1000),
            "heartbeat.interval.ms": int(min(3.0, connection.session_timeout_s / 4) * 1000),
            "max.poll.interval.ms": int(connection.max_poll_interval_s * 1000),
            "queued.min.messages": _AHEAD_MESSAGES,
            "queued.max.messages.kbytes": _AHEAD_KILOBYTES,
            # A fetch of empty partitions delays the next fetch to the same broker by up to this time.
            "fetch.wait.max.ms": 100,
            # Refill the local queue immediately; the default waits for 1 s.
            "fetch.queue.backoff.ms": 10,
            "error_cb": self._on_error,
            "on_commit": self._on_commit,
        }


def _raw(message: Message, share: int) -> RawMessage:
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    kind, milliseconds = message.timestamp()
    key = message.key()
    return RawMessage(
        message_id=f"{topic}-{partition}-{offset}",
        body=_bytes(message.value()),
        headers=_headers(message),
        timestamp=datetime.now(UTC) if kind == TIMESTAMP_NOT_AVAILABLE else timestamp_from_ms(milliseconds),
        metadata={"topic": topic, "partition": partition, "offset": offset, "share": share},
        key="" if key is None else _decode(key),
    )


def _headers(message: Message) -> dict[str, str]:
    try:
        headers = _read_headers(message)
    except (SystemError, UnicodeDecodeError) as exc:
        return {UNREADABLE: f"a name is not UTF-8 ({exc!r:.200})"}
    if not headers:
        return _NO_HEADERS
    return {name.lower(): "" if value is None else _decode(value) for name, value in headers}


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _decode(value: str | bytes) -> str:
    """Decode as UTF-8, else as Latin-1.

    Different keys may then become equal, which keeps more order, not less.
    """
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _numbers(partitions: list[TopicPartition]) -> str:
    return ", ".join(str(at.partition) for at in partitions) or "none"


def _text(error: KafkaError | None) -> str:
    return "unknown" if error is None else f"{redact(error.str())} ({error.name()})"
