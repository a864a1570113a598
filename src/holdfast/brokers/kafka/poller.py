"""The thread that a Kafka consumer lives in. librdkafka's calls block, and all that concerns one consumer is done here.

It polls without end, also while it is paused or everything that may be in hand is in hand: then its partitions are
paused, and the consumer stays a member of its group. What comes is handed to the event loop in batches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from threading import Event, Thread
from time import monotonic
from typing import Any, Final

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException, Message, TopicPartition

from holdfast.brokers.kafka.connection import ClientLog, KafkaConfig, client_settings
from holdfast.brokers.kafka.offsets import InFlightOffsets
from holdfast.brokers.port import RawMessage, timestamp_from_ms
from holdfast.core.retry import Backoff
from holdfast.observe.redact import redact

_log: Final = logging.getLogger("holdfast.kafka")

_COMMIT_EVERY_S: Final = 0.5
#: So many messages at once.
_BATCH: Final = 500
#: So long one look for a first message takes. It is the time that a pause, a commit or an end may have to wait.
_LOOK_S: Final = 0.1
#: Pausing throws away what has been fetched ahead; a consumer that is full for a shorter time just waits.
_FULL_FOR_S: Final = 0.25
#: Fetched ahead by the client, beside what is in hand.
_AHEAD_MESSAGES: Final = 10_000
_AHEAD_KILOBYTES: Final = 16_384
_NO_HEADERS: Final[dict[str, str]] = {}


class Poller:
    """One consumer of one topic. `arrived` is called in the loop with what has come."""

    def __init__(
        self,
        connection: KafkaConfig,
        topic: str,
        group: str,
        holdings: InFlightOffsets,
        arrived: Callable[[list[RawMessage]], None],
    ) -> None:
        self._connection = connection
        self._topic = topic
        self._group = group
        self._holdings = holdings
        self._arrived = arrived
        self._loop = asyncio.get_running_loop()
        self._thread = Thread(target=self._main, name=f"holdfast-kafka-{topic}", daemon=True)
        self._ending = Event()
        self._paused = False
        self._flowing = True
        self._lost = False
        self._commit_at = 0.0

    def start(self) -> None:
        self._thread.start()

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def stop(self, within_s: float) -> bool:
        """Leave the group, having committed what is done. Whether that is through by then; it ends in any case."""
        self._ending.set()
        self._holdings.wake()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    # From here on: the thread itself ----------------------------------------------------------------

    def _main(self) -> None:
        backoff = Backoff()
        while not self._ending.is_set():
            try:
                self._live(backoff)
            except Exception as exc:  # noqa: BLE001  (a thread that ended would look like a quiet topic)
                if self._loop.is_closed():
                    _log.warning("consumer of %s ends: there is nobody left to read for", self._topic)
                    return
                _log.warning("consumer of %s failed and begins anew: %s", self._topic, redact(repr(exc)))
                self._ending.wait(backoff.next_s())

    def _live(self, backoff: Backoff) -> None:
        consumer = Consumer(self._settings(), logger=ClientLog())
        try:
            consumer.subscribe([self._topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._gone)
            while not self._ending.is_set():
                if self._turn(consumer):
                    backoff.reset()
            self._pass_markers(consumer)
        finally:
            # Whatever is in hand is for others from now on; what is done is done.
            self._commit_now(consumer, None)
            self._holdings.revoke()
            with suppress(KafkaException, RuntimeError):
                consumer.close()

    def _turn(self, consumer: Consumer) -> bool:
        room = 0 if self._paused else self._holdings.room()
        if not room and self._flowing and not self._paused:
            self._commit_if_due(consumer)
            room = self._holdings.room() if self._holdings.wait_for_room(_FULL_FOR_S) else 0
        self._let_flow(consumer, room > 0)
        came = consumer.consume(1, _LOOK_S)
        if came and room > 1:
            came += consumer.consume(min(room, _BATCH) - 1, 0)
        if came:
            self._hand_over(came)
        self._commit_if_due(consumer)
        return bool(came)

    def _let_flow(self, consumer: Consumer, flowing: bool) -> None:
        if flowing != self._flowing:
            self._flowing = flowing
            (consumer.resume if flowing else consumer.pause)(consumer.assignment())

    def _hand_over(self, came: list[Message]) -> None:
        batch = []
        for message in came:
            error = message.error()
            if error is not None:
                self._complained(error)
                continue
            share = self._holdings.add(message.partition() or 0, message.offset() or 0)
            if share is not None:
                batch.append(_raw(message, share))
        if batch:
            self._back()
            self._loop.call_soon_threadsafe(self._arrived, batch)

    # Commits ----------------------------------------------------------------------------------------

    def _commit_if_due(self, consumer: Consumer) -> None:
        now = monotonic()
        if now < self._commit_at and not self._holdings.commit_is_due():
            return
        self._commit_at = now + _COMMIT_EVERY_S
        self._pass_markers(consumer)
        offsets = self._holdings.to_commit()
        if offsets:
            try:
                consumer.commit(offsets=self._places(offsets), asynchronous=True)
            except KafkaException as exc:
                self._holdings.not_committed(offsets)
                _log.debug("commit of %s has to wait: %s", self._topic, _text(exc.args[0]))

    def _commit_now(self, consumer: Consumer, partitions: Iterable[int] | None) -> None:
        offsets = self._holdings.to_commit(partitions)
        if offsets:
            try:
                consumer.commit(offsets=self._places(offsets), asynchronous=False)
            except (KafkaException, RuntimeError) as exc:
                self._holdings.not_committed(offsets)
                _log.warning("last commit of %s failed, messages will be repeated: %s", self._topic, redact(str(exc)))

    def _committed(self, error: KafkaError | None, places: list[TopicPartition]) -> None:
        failed = [place.partition for place in places if error is not None or place.error is not None]
        if failed:
            # The next turn commits them again, if they are still ours.
            self._holdings.not_committed(failed)
            _log.debug("commit of %s failed: %s", self._topic, _text(error or places[0].error))
        else:
            self._back()

    def _pass_markers(self, consumer: Consumer) -> None:
        """Commits then reach the end of the log behind a transaction, and monitors that compare the two show no lag.

        Only between two turns: inside of `consume`, as rebalances are, the client is ahead of `take`.
        """
        self._holdings.reach(self._positions(consumer, self._holdings.partitions()))

    def _positions(self, consumer: Consumer, partitions: Iterable[int]) -> dict[int, int]:
        """Partition → where the client reads next, of those where it has read anything."""
        asked = [TopicPartition(self._topic, partition) for partition in partitions]
        if not asked:
            return {}
        try:
            found = consumer.position(asked)
        except (KafkaException, RuntimeError) as exc:
            _log.debug("positions in %s are not known: %s", self._topic, redact(str(exc)))
            return {}
        return {place.partition: place.offset for place in found if place.offset >= 0}

    def _places(self, offsets: dict[int, int]) -> list[TopicPartition]:
        return [TopicPartition(self._topic, partition, offset) for partition, offset in offsets.items()]

    # Rebalances: called by `consume` ----------------------------------------------------------------

    def _assigned(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        partitions = [place.partition for place in places]
        self._holdings.assign(partitions, self._positions(consumer, partitions))
        cooperative = self._connection.assignment == "cooperative-sticky"
        (consumer.incremental_assign if cooperative else consumer.assign)(places)
        if places:
            # The client remembers a pause beyond the assignment: a partition that comes back would stay silent.
            (consumer.resume if self._flowing else consumer.pause)(places)
        _log.info("%s of group %s has got partitions %s", self._topic, self._group, _numbers(places))

    def _revoked(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        partitions = [place.partition for place in places]
        patience = 0.0 if self._ending.is_set() else self._connection.revoke_wait_s
        left = self._holdings.wait_for_handovers(partitions, patience)
        self._commit_now(consumer, partitions)
        self._holdings.revoke(partitions)
        _log.info(
            "%s of group %s gives partitions %s away%s",
            self._topic,
            self._group,
            _numbers(places),
            f"; {left} messages were still being handed over and will be repeated" if left else "",
        )

    def _gone(self, _: Consumer, places: list[TopicPartition]) -> None:
        self._holdings.revoke(place.partition for place in places)
        _log.warning("%s of group %s has lost partitions %s", self._topic, self._group, _numbers(places))

    # ------------------------------------------------------------------------------------------------

    def _complained(self, error: KafkaError) -> None:
        if error.fatal():
            raise KafkaException(error)
        if not self._lost:
            self._lost = True
            _log.warning("consumer of %s is in trouble and tries on: %s", self._topic, _text(error))

    def _back(self) -> None:
        if self._lost:
            self._lost = False
            _log.info("consumer of %s is well again", self._topic)

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
            # A question about empty partitions holds up the next one to the same broker for so long.
            "fetch.wait.max.ms": 100,
            # What was read is fetched again at once, not after the default's second.
            "fetch.queue.backoff.ms": 10,
            "error_cb": self._complained,
            "on_commit": self._committed,
        }


def _raw(message: Message, share: int) -> RawMessage:
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    kind, milliseconds = message.timestamp()
    key, headers = message.key(), message.headers()
    return RawMessage(
        message_id=f"{topic}-{partition}-{offset}",
        body=_bytes(message.value()),
        headers=_headers(headers) if headers else _NO_HEADERS,
        timestamp=datetime.now(UTC) if kind == TIMESTAMP_NOT_AVAILABLE else timestamp_from_ms(milliseconds),
        metadata={"topic": topic, "partition": partition, "offset": offset, "share": share},
        key="" if key is None else _word(key),
    )


def _headers(headers: Any) -> dict[str, str]:
    return {name.lower(): "" if value is None else _word(value) for name, value in headers}


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _word(value: str | bytes) -> str:
    """Text. What is not UTF-8 is told byte by byte: different keys may then look alike, which keeps more order, not
    less."""
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _numbers(places: list[TopicPartition]) -> str:
    return ", ".join(str(place.partition) for place in places) or "none"


def _text(error: KafkaError | None) -> str:
    return "unknown" if error is None else f"{redact(error.str())} ({error.name()})"
