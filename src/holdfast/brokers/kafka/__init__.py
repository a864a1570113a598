"""Kafka client based on librdkafka (decision 16).

`connection` has settings, errors and admin queries; `adapter` the consumer and the producer. `poller` is the thread of
the consumer, `offsets` tracks its messages in flight.
"""

from holdfast.brokers.kafka.adapter import KafkaAdapter as KafkaAdapter
from holdfast.brokers.kafka.adapter import KafkaPublisher as KafkaPublisher
from holdfast.brokers.kafka.connection import KafkaConfig as KafkaConfig
