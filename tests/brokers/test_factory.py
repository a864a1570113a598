"""From a broker's name to its client."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from holdfast.brokers.factory import BROKER_TYPES, build_adapter, build_publisher, connection_model
from holdfast.brokers.memory import MemoryConfig
from holdfast.errors import InvalidOption

#: What each broker's connection needs at least.
LEAST: dict[str, dict[str, Any]] = {
    "kafka": {"bootstrap_servers": "127.0.0.1:9"},
    "rabbitmq": {},
    "sqs": {},
    "redis": {},
    "memory": {},
}

#: Of a process that has asked for one broker.
LOADED = """
import sys
from holdfast.brokers.factory import connection_model
connection_model(sys.argv[1])
print(*sorted({"confluent_kafka", "aio_pika", "aiobotocore", "redis"} & sys.modules.keys()))
"""

#: A process in which a package cannot be imported.
MISSING = """
import sys
sys.modules[sys.argv[2]] = None
from holdfast.brokers.factory import connection_model
from holdfast.errors import MissingExtra
try:
    connection_model(sys.argv[1])
except MissingExtra as exc:
    print(exc)
"""


def run(program: str, *words: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("broker_type", BROKER_TYPES)
def test_every_broker_has_the_same_two_ends(broker_type: str) -> None:
    model = connection_model(broker_type)
    connection = model.model_validate(LEAST[broker_type])
    assert model.model_config.get("extra") == "forbid"
    assert model.model_config.get("frozen") is True
    adapter = build_adapter(broker_type, connection, "orders", "readers", 5, dlq_name="orders-dead")
    for method in ("connect", "consume", "ack", "nack", "send_to_dlq", "owns", "pause", "resume", "lag"):
        assert callable(getattr(adapter, method))
    publisher = build_publisher(broker_type, connection)
    for end in (adapter, publisher):
        assert callable(end.health_check)
        assert callable(end.close)
    assert callable(publisher.publish)


@pytest.mark.parametrize(
    ("broker_type", "library"),
    [
        ("kafka", "confluent_kafka"),
        ("rabbitmq", "aio_pika"),
        ("sqs", "aiobotocore"),
        ("redis", "redis"),
        ("memory", ""),
    ],
)
def test_a_library_is_loaded_only_for_its_broker(broker_type: str, library: str) -> None:
    assert run(LOADED, broker_type) == library


@pytest.mark.parametrize(
    ("broker_type", "library"),
    [("kafka", "confluent_kafka"), ("rabbitmq", "aio_pika"), ("sqs", "aiobotocore"), ("redis", "redis")],
)
def test_a_missing_extra_says_what_to_install(broker_type: str, library: str) -> None:
    assert f"pip install 'holdfast[{broker_type}]'" in run(MISSING, broker_type, library)


def test_mistakes_are_named_and_values_are_not() -> None:
    with pytest.raises(InvalidOption, match="kafka, rabbitmq, sqs, redis, memory"):
        connection_model("pulsar")
    with pytest.raises(InvalidOption, match="prefetch"):
        build_adapter("memory", {}, "orders", "readers", 0)
    with pytest.raises(InvalidOption, match="is not valid for queue"):
        build_adapter("memory", {}, "orders", "readers", dlq_name="orders")
    with pytest.raises(InvalidOption, match="connection of redis must be RedisConfig"):
        build_publisher("redis", MemoryConfig())
    with pytest.raises(InvalidOption) as caught:
        build_publisher("redis", {"url": "tcp://ann:s3cret-word@h", "prot": 1})
    assert "prot: Extra inputs" in str(caught.value)
    assert "s3cret-word" not in f"{caught.value!r} {caught.value.__cause__!r} {caught.value.__context__!r}"


@pytest.mark.parametrize("broker_type", BROKER_TYPES)
def test_no_model_of_a_connection_shows_what_it_was_given(broker_type: str) -> None:
    with pytest.raises(ValidationError) as caught:
        connection_model(broker_type).model_validate({"bootstrap_servers": "x", "pasword": "hunter2"})
    assert "hunter2" not in str(caught.value)
