"""The factory builds the adapter and the publisher of a broker by its type."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from holdfast.brokers.factory import BROKER_TYPES, build_adapter, build_publisher, connection_model
from holdfast.brokers.memory import MemoryConfig
from holdfast.errors import InvalidOption

#: The required settings of each broker's connection.
REQUIRED_SETTINGS: dict[str, dict[str, Any]] = {
    "kafka": {"bootstrap_servers": "127.0.0.1:9"},
    "rabbitmq": {},
    "sqs": {},
    "redis": {},
    "memory": {},
}

#: Prints the client libraries that loading one broker imports.
LOADED_LIBRARIES_PROGRAM = """
import sys
from holdfast.brokers.factory import connection_model
connection_model(sys.argv[1])
print(*sorted({"confluent_kafka", "aio_pika", "aiobotocore", "redis"} & sys.modules.keys()))
"""

#: Prints the error when a package cannot be imported.
MISSING_PACKAGE_PROGRAM = """
import sys
sys.modules[sys.argv[2]] = None
from holdfast.brokers.factory import connection_model
from holdfast.errors import MissingExtra
try:
    connection_model(sys.argv[1])
except MissingExtra as exc:
    print(exc)
"""


def run(program: str, *args: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("broker_type", BROKER_TYPES)
def test_every_broker_has_an_adapter_and_a_publisher(broker_type: str) -> None:
    model = connection_model(broker_type)
    connection = model.model_validate(REQUIRED_SETTINGS[broker_type])
    assert model.model_config.get("extra") == "forbid"
    assert model.model_config.get("frozen") is True
    adapter = build_adapter(broker_type, connection, "orders", "readers", 5, dlq_name="orders-dead")
    for method in ("connect", "consume", "ack", "nack", "send_to_dlq", "owns", "pause", "resume", "lag"):
        assert callable(getattr(adapter, method))
    publisher = build_publisher(broker_type, connection)
    for client in (adapter, publisher):
        assert callable(client.health_check)
        assert callable(client.close)
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
    assert run(LOADED_LIBRARIES_PROGRAM, broker_type) == library


@pytest.mark.parametrize(
    ("broker_type", "library"),
    [("kafka", "confluent_kafka"), ("rabbitmq", "aio_pika"), ("sqs", "aiobotocore"), ("redis", "redis")],
)
def test_a_missing_extra_names_the_package_to_install(broker_type: str, library: str) -> None:
    assert f"pip install 'holdfast[{broker_type}]'" in run(MISSING_PACKAGE_PROGRAM, broker_type, library)


def test_errors_name_the_setting_and_never_its_value() -> None:
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
def test_validation_errors_of_connections_do_not_show_values(broker_type: str) -> None:
    with pytest.raises(ValidationError) as caught:
        connection_model(broker_type).model_validate({"bootstrap_servers": "x", "pasword": "hunter2"})
    assert "hunter2" not in str(caught.value)
