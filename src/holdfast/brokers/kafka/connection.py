"""Kafka settings, error translation, client log, and metadata and lag queries.

Errors and log records contain no credentials; `client_settings` does, so never log its result.

`KafkaAdmin` checks topics and availability and computes the lag, with clients that never join a group. Its methods
block for about `within_s` per request; call them in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from time import monotonic
from typing import Any, Final, Literal, Self

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka import admin as _admin
from confluent_kafka.admin import AdminClient
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from holdfast.errors import BrokerRefused, BrokerUnavailable
from holdfast.observe.redact import redact

_log: Final = logging.getLogger("holdfast.kafka")
#: The client says the same thing many times a second while a broker is away; it is passed on once in so long.
_SAME_AGAIN_S: Final = 10.0

#: The broker answers, and trying again may not mend it.
_REFUSALS: Final = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError._SSL,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._INVALID_ARG,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.POLICY_VIOLATION,
    }
)
#: They are about the topic, whatever the message.
_OF_THE_TOPIC: Final = frozenset(
    {
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_EXCEPTION,
    }
)


_TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})


class MessageTooLarge(BrokerRefused):
    """Of a message, not of Kafka: a smaller one would be taken."""


class KafkaConfig(BaseModel):
    """Where Kafka is, who we are to it, and how patient we are."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    #: host:port, several with commas.
    bootstrap_servers: str = Field(min_length=1)
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "PLAIN"
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    #: Who has to have signed the broker's certificate; none: whom this machine trusts.
    ca_file: str | None = None
    #: Our own certificate, for brokers that ask for one.
    cert_file: str | None = None
    key_file: str | None = None
    key_password: SecretStr | None = None
    #: Whether the broker's certificate has to be valid and for its host.
    verify: bool = True

    client_id: str = "holdfast"
    #: How long `connect` tries.
    connect_timeout_s: float = Field(default=5.0, gt=0)

    #: Where a group begins that has committed nothing yet.
    start_at: Literal["earliest", "latest"] = "earliest"
    #: All members of a group must agree. "range" is what most other clients use unless told otherwise.
    assignment: Literal["cooperative-sticky", "range"] = "cooperative-sticky"
    #: After so long without a sign of life a member's partitions go to others.
    session_timeout_s: float = Field(default=10.0, gt=0)
    #: The client's own limit for a consumer that does not poll. Ours polls always, also while it is paused.
    max_poll_interval_s: float = Field(default=300.0, gt=0)
    #: When partitions are taken away: how long to wait for messages that are being handed over.
    revoke_wait_s: float = Field(default=3.0, ge=0)

    #: After so long a message that the broker has not confirmed counts as not published.
    publish_timeout_s: float = Field(default=10.0, gt=0)
    linger_ms: float = Field(default=2.0, ge=0)
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "none"
    #: Larger ones are refused before they are sent; brokers have a limit of their own.
    max_message_bytes: int = Field(default=1_048_576, ge=1_000, le=1_000_000_000)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.security_protocol.startswith("SASL") and (self.sasl_username is None or self.sasl_password is None):
            raise ValueError(f"{self.security_protocol} needs sasl_username and sasl_password")
        given = self.ca_file or self.cert_file or self.key_file or self.key_password or not self.verify
        if given and not self.security_protocol.endswith("SSL"):
            raise ValueError("ca_file, cert_file, key_file, key_password and verify are for SSL and SASL_SSL")
        if self.key_file and not self.cert_file:
            raise ValueError("key_file needs its cert_file")
        if self.max_poll_interval_s < self.session_timeout_s:
            raise ValueError("max_poll_interval_s must not be shorter than session_timeout_s")
        return self


def client_settings(connection: KafkaConfig) -> dict[str, Any]:
    """What every client is told, in librdkafka's words. It holds secrets: never log it."""
    settings: dict[str, Any] = {
        "bootstrap.servers": connection.bootstrap_servers,
        "client.id": connection.client_id,
        "security.protocol": connection.security_protocol,
        # Back soon after a restart, but not a hundred times a second.
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 2_000,
        "socket.keepalive.enable": True,
        # A stopped broker keeps its connections: without an answer for so long we try a new one.
        "socket.timeout.ms": 10_000,
    }
    if connection.security_protocol.startswith("SASL") and connection.sasl_password is not None:
        settings["sasl.mechanisms"] = connection.sasl_mechanism
        settings["sasl.username"] = connection.sasl_username
        settings["sasl.password"] = connection.sasl_password.get_secret_value()
    if connection.security_protocol.endswith("SSL"):
        settings["enable.ssl.certificate.verification"] = connection.verify
        settings["ssl.endpoint.identification.algorithm"] = "https" if connection.verify else "none"
        files = {
            "ssl.ca.location": connection.ca_file,
            "ssl.certificate.location": connection.cert_file,
            "ssl.key.location": connection.key_file,
        }
        settings.update({name: path for name, path in files.items() if path is not None})
        if connection.key_password is not None:
            settings["ssl.key.password"] = connection.key_password.get_secret_value()
    return settings


def is_refusal(error: KafkaError) -> bool:
    """Whether the broker says no, rather than nothing."""
    return error.code() in _REFUSALS


def is_topic_error(error: KafkaError) -> bool:
    """Whether every message of the topic would fare the same."""
    return error.code() in _OF_THE_TOPIC


def translate(error: KafkaError, doing: str) -> BrokerUnavailable:
    """`doing` as in "Kafka did not …"."""
    kind = BrokerRefused if is_refusal(error) else BrokerUnavailable
    if error.code() in _TOO_LARGE:
        kind = MessageTooLarge
    return kind(f"Kafka did not {doing}: {redact(error.str())} ({error.name()})")


class ClientLog:
    """Takes librdkafka's log lines, which would else go to standard error, and writes them for those who debug.

    What matters to operators the adapter and the publisher say in their own words.
    """

    def __init__(self) -> None:
        self._said: dict[str, float] = {}

    def log(self, level: int, text: str, *values: object) -> None:
        line = redact(text % values if values else text)
        # The same but for its times is the same.
        gist = "".join(letter for letter in line if not letter.isdigit())
        now = monotonic()
        if now - self._said.get(gist, -_SAME_AGAIN_S) < _SAME_AGAIN_S:
            return
        if len(self._said) > 1_000:
            self._said.clear()
        self._said[gist] = now
        _log.log(level if level >= logging.CRITICAL else logging.DEBUG, "%s", line)


#: A first connection may have to be tried more than once; in between we look whether the broker has said no.
_TRY_S: Final = 0.5
#: The library exports it, but not to type checkers.
_OffsetSpec: Final[Any] = vars(_admin)["OffsetSpec"]


class KafkaAdmin:
    """Clients of its own, which never join a group."""

    def __init__(self, connection: KafkaConfig) -> None:
        self._connection = connection
        self._refusal: KafkaError | None = None
        self._consumer: Consumer | None = None
        settings = {**client_settings(connection), "error_cb": self._complained}
        try:
            self._client = AdminClient(settings, logger=ClientLog())
        except KafkaException as exc:
            # A certificate that cannot be read, and the like.
            raise translate(exc.args[0], "accept the connection's settings") from None

    def check_topic(self, topic: str | None, within_s: float) -> list[int]:
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
                    raise translate(error, f"answer at {self._connection.bootstrap_servers}") from None

    def is_up(self, within_s: float) -> bool:
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
