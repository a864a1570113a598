"""How to reach Kafka, and how its client's errors and log lines are told: never with a password in them."""

from __future__ import annotations

import logging
from time import monotonic
from typing import Any, Final, Literal, Self

from confluent_kafka import KafkaError
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


class KafkaConnection(BaseModel):
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


def client_settings(connection: KafkaConnection) -> dict[str, Any]:
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


def is_of_the_topic(error: KafkaError) -> bool:
    """Whether every message of the topic would fare the same."""
    return error.code() in _OF_THE_TOPIC


def translated(error: KafkaError, doing: str) -> BrokerUnavailable:
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
