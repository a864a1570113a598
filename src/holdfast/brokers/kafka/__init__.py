"""Kafka, by librdkafka (decision 16).

`connection` says how to reach it, `adapter` consumes, `publisher` writes. `poller` is the thread that the consumer
lives in, `holdings` what it holds, `questions` what is asked of the broker beside the stream of messages.
"""

from holdfast.brokers.kafka.adapter import KafkaAdapter as KafkaAdapter
from holdfast.brokers.kafka.adapter import KafkaPublisher as KafkaPublisher
from holdfast.brokers.kafka.connection import KafkaConfig as KafkaConfig
