"""A broker that has never had a group: whoever asks for one's offsets hears at first that nobody coordinates it."""

from __future__ import annotations

import subprocess
import sys

from confluent_kafka import Producer

from tests.brokers.kafka_server import MakeKafka

#: In a process of its own: the library's fault was to end it.
_ASK = """
import sys, time
from holdfast.brokers.kafka.connection import KafkaAdmin, KafkaConfig

questions = KafkaAdmin(KafkaConfig(bootstrap_servers=sys.argv[1]))
until = time.monotonic() + 30
while (lag := questions.lag("fresh", "first", {}, 2)) is None and time.monotonic() < until:
    time.sleep(0.05)
print(lag)
"""


def test_the_lag_of_a_brokers_first_group_can_be_asked(make_kafka: MakeKafka) -> None:
    server = make_kafka()
    producer = Producer({"bootstrap.servers": server.address})
    for number in range(3):
        producer.produce("fresh", str(number).encode())
    assert producer.flush(30) == 0
    done = subprocess.run(
        [sys.executable, "-c", _ASK, server.address], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
