"""What is asked of Kafka beside the stream of messages: are you there, is there this topic, how far behind are we.

Every method blocks for as long as it is told at most: call it in a thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka import admin as _admin
from confluent_kafka.admin import AdminClient

from holdfast.brokers.kafka.connection import (
    ClientLog,
    KafkaConnection,
    client_settings,
    is_refusal,
    translated,
)
from holdfast.errors import BrokerRefused

#: A first connection may have to be tried more than once; in between we look whether the broker has said no.
_TRY_S: Final = 0.5
#: The library exports it, but not to type checkers.
_OffsetSpec: Final[Any] = vars(_admin)["OffsetSpec"]


class Questions:
    """Clients of its own, which never join a group."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._refusal: KafkaError | None = None
        self._consumer: Consumer | None = None
        settings = {**client_settings(connection), "error_cb": self._complained}
        try:
            self._client = AdminClient(settings, logger=ClientLog())
        except KafkaException as exc:
            # A certificate that cannot be read, and the like.
            raise translated(exc.args[0], "accept the connection's settings") from None

    def reach(self, topic: str | None, within_s: float) -> list[int]:
        """The topic's partitions. Raises why not: the broker is silent or says no, or there is no such topic.

        Without a topic: only whether the broker answers.
        """
        until = monotonic() + within_s
        while True:
            try:
                return self._ask(topic, min(_TRY_S, within_s))
            except KafkaException as exc:
                self._client.poll(0)
                error = self._refusal or exc.args[0]
                if is_refusal(error) or monotonic() >= until:
                    raise translated(error, f"answer at {self._connection.bootstrap_servers}") from None

    def answers(self, within_s: float) -> bool:
        """Whether the broker answers now."""
        try:
            self._client.describe_cluster(request_timeout=within_s).result(within_s + 1)
        except (KafkaException, TimeoutError):
            return False
        return True

    def lag(self, topic: str, group: str, done_up_to: Mapping[int, int], within_s: float) -> int | None:
        """How many messages of the topic wait for the group; None: the broker does not say within this time.

        `done_up_to` is where we are ahead of what is committed.
        """
        try:
            partitions = [TopicPartition(topic, number) for number in self._ask(topic, within_s)]
            committed = self._reader(group).committed(partitions, timeout=within_s)
            begun: dict[int, int] = {place.partition: place.offset for place in committed}
            ends = self._offsets(partitions, _OffsetSpec.latest(), within_s)
            fresh = [place for place in partitions if begun.get(place.partition, -1) < 0]
            if fresh:
                first = _OffsetSpec.earliest() if self._connection.start_at == "earliest" else _OffsetSpec.latest()
                begun.update(self._offsets(fresh, first, within_s))
        except (KafkaException, TimeoutError):
            return None
        waiting = 0
        for number, end in ends.items():
            waiting += max(0, end - max(begun[number], done_up_to.get(number, 0)))
        return waiting

    def _ask(self, topic: str | None, within_s: float) -> list[int]:
        if topic is None:
            self._client.describe_cluster(request_timeout=within_s).result(within_s + 1)
            return []
        # Not `list_topics`: a broker that makes topics on demand would make this one.
        asked = self._client.describe_topics(TopicCollection([topic]), request_timeout=within_s)[topic]
        try:
            return sorted(partition.id for partition in asked.result(within_s + 1).partitions)
        except KafkaException as exc:
            if exc.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise BrokerRefused(f"Kafka has no topic {topic!r}: create it, or correct the name") from None
            raise

    def _reader(self, group: str) -> Consumer:
        """Asks what the group has committed. Not the admin client, whose library ends the whole process if the broker
        that it asks is not (or not yet, or no longer) the group's coordinator: it looks for a group that it has not."""
        if self._consumer is None:
            settings = {**client_settings(self._connection), "group.id": group, "enable.auto.commit": False}
            self._consumer = Consumer(settings, logger=ClientLog())
        return self._consumer

    def _offsets(self, partitions: list[TopicPartition], which: Any, within_s: float) -> dict[int, int]:
        answers = self._client.list_offsets(dict.fromkeys(partitions, which), request_timeout=within_s)
        return {place.partition: answer.result().offset for place, answer in answers.items()}

    def _complained(self, error: KafkaError) -> None:
        self._refusal = error if is_refusal(error) else None
