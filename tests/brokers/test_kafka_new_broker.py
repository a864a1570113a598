"""Lag of a group on a new broker: the first requests for offsets fail because the group has no coordinator yet."""

from __future__ import annotations

import subprocess
import sys

from confluent_kafka import Producer

from tests.brokers.kafka_server import MakeKafka

#: Runs in a separate process: the library's bug crashed the process.
_READ_LAG_PROGRAM = """
import sys, time
from holdfast.brokers.kafka.connection import KafkaAdmin, KafkaConfig

admin = KafkaAdmin(KafkaConfig(bootstrap_servers=sys.argv[1]))
deadline = time.monotonic() + 30
while (lag := admin.lag("fresh", "first", {}, 2)) is None and time.monotonic() < deadline:
    time.sleep(0.05)
print(lag)
"""


def test_the_lag_of_a_brokers_first_group_is_reported(make_kafka: MakeKafka) -> None:
    server = make_kafka()
    producer = Producer({"bootstrap.servers": server.address})
    for number in range(3):
        producer.produce("fresh", str(number).encode())
    assert producer.flush(30) == 0
    done = subprocess.run(
        [sys.executable, "-c", _READ_LAG_PROGRAM, server.address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
