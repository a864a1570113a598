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

_log: Final = logging.getLogger("holdfast.brokers.kafka")
#: Minimum interval between equal log lines: the client repeats them many times a second during an outage.
_REPEAT_AFTER_S: Final = 10.0

#: The broker answered with an error that a retry may not fix.
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
#: Errors that concern the topic, not one message.
_TOPIC_ERRORS: Final = frozenset(
    {
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_EXCEPTION,
    }
)


_TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})


class MessageTooLarge(BrokerRefused):
    """The message exceeds a size limit. A smaller one would be accepted."""


class KafkaConfig(BaseModel):
    """Address, credentials, timeouts and limits of a Kafka client."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    #: host:port, comma-separated.
    bootstrap_servers: str = Field(min_length=1)
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "PLAIN"
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    #: CA certificates that verify the broker. Default: the system's trust store.
    ca_file: str | None = None
    #: Client certificate, for brokers that require one.
    cert_file: str | None = None
    key_file: str | None = None
    key_password: SecretStr | None = None
    #: Verify the broker's certificate and host name.
    verify: bool = True

    client_id: str = "holdfast"
    #: Timeout of `connect`.
    connect_timeout_s: float = Field(default=5.0, gt=0)

    #: Start position of a group without committed offsets.
    start_at: Literal["earliest", "latest"] = "earliest"
    #: All members of a group must use the same strategy. Most other clients default to "range".
    assignment: Literal["cooperative-sticky", "range"] = "cooperative-sticky"
    #: Partitions of a member are reassigned after this time without a heartbeat.
    session_timeout_s: float = Field(default=10.0, gt=0)
    #: Limit between two polls. holdfast's consumer polls continuously, also while it is paused.
    max_poll_interval_s: float = Field(default=300.0, gt=0)
    #: On revocation of partitions: how long to wait for messages that are being handled.
    revoke_wait_s: float = Field(default=3.0, ge=0)

    #: A message that is not confirmed within this time counts as not published.
    publish_timeout_s: float = Field(default=10.0, gt=0)
    linger_ms: float = Field(default=2.0, ge=0)
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "none"
    #: Larger messages are refused before they are sent. Brokers have their own limit.
    max_message_bytes: int = Field(default=1_048_576, ge=1_000, le=1_000_000_000)

    @model_validator(mode="after")
    def _check(self) -> Self:
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
    """librdkafka settings shared by all clients. Contains secrets: never log it."""
    settings: dict[str, Any] = {
        "bootstrap.servers": connection.bootstrap_servers,
        "client.id": connection.client_id,
        "security.protocol": connection.security_protocol,
        # Reconnect soon after a broker restart, but not a hundred times a second.
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 2_000,
        "socket.keepalive.enable": True,
        # A stopped broker process keeps its connections open: reconnect after 10 s without an answer.
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
    """Whether the broker refused, as opposed to not answering."""
    return error.code() in _REFUSALS


def is_topic_error(error: KafkaError) -> bool:
    """Whether every message of the topic would fail the same way."""
    return error.code() in _TOPIC_ERRORS


def translate(error: KafkaError, doing: str) -> BrokerUnavailable:
    """Convert a client error. `doing` completes the sentence "Kafka did not …"."""
    kind = BrokerRefused if is_refusal(error) else BrokerUnavailable
    if error.code() in _TOO_LARGE:
        kind = MessageTooLarge
    return kind(f"Kafka did not {doing}: {redact(error.str())} ({error.name()})")


class ClientLog:
    """Logger for librdkafka: writes its lines at DEBUG, redacted and throttled, instead of to stderr.

    Adapter and publisher log what operators need themselves.
    """

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}

    def log(self, level: int, text: str, *values: object) -> None:
        record = redact(text % values if values else text)
        # Records that differ only in numbers are equal.
        gist = "".join(char for char in record if not char.isdigit())
        now = monotonic()
        if now - self._logged_at.get(gist, -_REPEAT_AFTER_S) < _REPEAT_AFTER_S:
            return
        if len(self._logged_at) > 1_000:
            self._logged_at.clear()
        self._logged_at[gist] = now
        _log.log(level if level >= logging.CRITICAL else logging.DEBUG, "%s", record)


#: Timeout of one connection attempt. Between attempts `check_topic` checks for a refusal.
_TRY_S: Final = 0.5
#: The library exports it, but without type information.
_OffsetSpec: Final[Any] = vars(_admin)["OffsetSpec"]


class KafkaAdmin:
    """Metadata and lag queries with separate clients that never join a group."""

    def __init__(self, connection: KafkaConfig) -> None:
        self._connection = connection
        self._refusal: KafkaError | None = None
        self._consumer: Consumer | None = None
        settings = {**client_settings(connection), "error_cb": self._on_error}
        try:
            self._client = AdminClient(settings, logger=ClientLog())
        except KafkaException as exc:
            # For example an unreadable certificate.
            raise translate(exc.args[0], "accept the connection's settings") from None

    def check_topic(self, topic: str | None, within_s: float) -> list[int]:
        """The partitions of a topic. Without a topic, only check that the broker answers.

        Raises `BrokerRefused` if the broker refuses or the topic does not exist, else `BrokerUnavailable`.
        """
        until = monotonic() + within_s
        while True:
            try:
                return self._find_partitions(topic, min(_TRY_S, within_s))
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
        """Number of messages of the topic waiting for the group; None if the broker does not answer in time.

        `done_up_to` has offsets that are done but not yet committed.
        """
        try:
            partitions = [TopicPartition(topic, number) for number in self._find_partitions(topic, within_s)]
            committed = self._offset_client(group).committed(partitions, timeout=within_s)
            starts: dict[int, int] = {at.partition: at.offset for at in committed}
            ends = self._offsets(partitions, _OffsetSpec.latest(), within_s)
            uncommitted = [at for at in partitions if starts.get(at.partition, -1) < 0]
            if uncommitted:
                first = _OffsetSpec.earliest() if self._connection.start_at == "earliest" else _OffsetSpec.latest()
                starts.update(self._offsets(uncommitted, first, within_s))
        except (KafkaException, TimeoutError):
            return None
        waiting = 0
        for number, end in ends.items():
            waiting += max(0, end - max(starts[number], done_up_to.get(number, 0)))
        return waiting

    def _find_partitions(self, topic: str | None, within_s: float) -> list[int]:
        if topic is None:
            self._client.describe_cluster(request_timeout=within_s).result(within_s + 1)
            return []
        # Not `list_topics`: a broker that creates topics on demand would create this one.
        description = self._client.describe_topics(TopicCollection([topic]), request_timeout=within_s)[topic]
        try:
            return sorted(partition.id for partition in description.result(within_s + 1).partitions)
        except KafkaException as exc:
            if exc.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise BrokerRefused(f"Kafka topic {topic!r} not found; create it or correct the name") from None
            raise

    def _offset_client(self, group: str) -> Consumer:
        """The client that reads committed offsets.

        Not the admin client: its library aborts the process if the broker it queries is not (or not yet, or no longer)
        the coordinator of the group.
        """
        if self._consumer is None:
            settings = {**client_settings(self._connection), "group.id": group, "enable.auto.commit": False}
            self._consumer = Consumer(settings, logger=ClientLog())
        return self._consumer

    def _offsets(self, partitions: list[TopicPartition], which: Any, within_s: float) -> dict[int, int]:
        answers = self._client.list_offsets(dict.fromkeys(partitions, which), request_timeout=within_s)
        return {at.partition: answer.result().offset for at, answer in answers.items()}

    def _on_error(self, error: KafkaError) -> None:
        self._refusal = error if is_refusal(error) else None
