"""Registry of broker types: builds the adapter, publisher and connection model by name.

The module of a broker, and with it the client library, is imported on first use.

A new broker is a module or package next to the others with the classes `<stem>Config`, `<stem>Adapter` and
`<stem>Publisher`, which implement `brokers.port`; an entry in `_BROKERS`; and, for its client library, an extra in
`holdfast.extras`. `BrokerContract` in `holdfast.testing.contract` tests it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ValidationError

from holdfast.brokers.port import Publisher, QueueAdapter
from holdfast.errors import InvalidOption
from holdfast.extras import require


class _Broker(NamedTuple):
    module: str
    #: Its classes are `<stem>Config`, `<stem>Adapter` and `<stem>Publisher`.
    stem: str
    #: Modules of its client library, installed by an extra.
    library: tuple[str, ...] = ()
    #: The adapter's name, if it does not begin with the stem.
    adapter: str = ""


_BROKERS: Final[Mapping[str, _Broker]] = {
    "kafka": _Broker("holdfast.brokers.kafka", "Kafka", ("confluent_kafka",)),
    "rabbitmq": _Broker("holdfast.brokers.rabbitmq", "Rabbit", ("aio_pika", "aiormq", "yarl")),
    "sqs": _Broker("holdfast.brokers.sqs", "Sqs", ("aiobotocore", "botocore")),
    "redis": _Broker("holdfast.brokers.redis_streams", "Redis", ("redis",)),
    "memory": _Broker("holdfast.brokers.memory", "Memory", adapter="MockQueueAdapter"),
}

#: Accepted values of `type`.
BROKER_TYPES: Final = tuple(_BROKERS)

#: Default limit of messages in flight per adapter.
DEFAULT_PREFETCH: Final = 100


def connection_model(broker_type: str) -> type[BaseModel]:
    """The pydantic model of the broker's `connection` section.

    Raises `InvalidOption` for an unknown broker type, `MissingExtra` if its library is not installed.
    """
    model: type[BaseModel] = _part(broker_type, "Config")
    return model


def build_adapter(
    broker_type: str,
    connection: BaseModel | Mapping[str, Any],
    queue_name: str,
    consumer_group: str,
    prefetch: int = DEFAULT_PREFETCH,
    *,
    dlq_name: str | None = None,
) -> QueueAdapter:
    """Build the consumer of a queue, not yet connected.

    Without `dlq_name`, dead letters go to `<queue>.dlq`, or to the closest name that the broker allows.
    """
    if prefetch < 1:
        raise InvalidOption(f"prefetch must be at least 1, not {prefetch}")
    options: dict[str, Any] = {"prefetch": prefetch}
    if dlq_name is not None:
        if not dlq_name or dlq_name == queue_name:
            raise InvalidOption(f"dlq_name {dlq_name!r} is not valid for queue {queue_name!r}; use another name")
        options["dlq_name"] = dlq_name
    model = _validate(broker_type, connection)
    adapter: QueueAdapter = _part(broker_type, "Adapter")(model, queue_name, consumer_group, **options)
    return adapter


def dead_letter_queue(broker_type: str, queue_name: str, dlq_name: str | None = None) -> str:
    """Name of the queue that receives the dead letters of a queue."""
    if dlq_name is not None:
        return dlq_name
    if broker_type == "sqs":
        from holdfast.brokers.sqs_connection import default_dlq_name

        return default_dlq_name(queue_name)
    return f"{queue_name}.dlq"


def build_publisher(broker_type: str, connection: BaseModel | Mapping[str, Any]) -> Publisher:
    """Build the publisher of a broker, not yet connected."""
    model = _validate(broker_type, connection)
    publisher: Publisher = _part(broker_type, "Publisher")(model)
    return publisher


def _part(broker_type: str, part: str) -> Any:
    broker = _BROKERS.get(broker_type)
    if broker is None:
        raise InvalidOption(f"unknown broker type {broker_type!r}; use one of {', '.join(BROKER_TYPES)}")
    require(f"broker type {broker_type!r}", *broker.library)
    name = broker.adapter if part == "Adapter" and broker.adapter else broker.stem + part
    return getattr(import_module(broker.module), name)


def _validate(broker_type: str, connection: BaseModel | Mapping[str, Any]) -> BaseModel:
    model = connection_model(broker_type)
    if isinstance(connection, model):
        return connection
    if isinstance(connection, BaseModel):
        raise InvalidOption(f"connection of {broker_type} must be {model.__name__}, not {type(connection).__name__}")
    try:
        return model.model_validate(dict(connection))
    except ValidationError as exc:
        # Without the values: one of them may be a password.
        mistakes = "; ".join(
            f"{'.'.join(map(str, mistake['loc'])) or 'connection'}: {mistake['msg']}"
            for mistake in exc.errors(include_input=False, include_url=False, include_context=False)
        )
        raise InvalidOption(f"connection of {broker_type} is not valid: {mistakes}") from None
