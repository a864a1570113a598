"""The brokers that these tests run on."""

from tests.brokers.kafka_server import kafka_server as kafka_server
from tests.brokers.kafka_server import make_kafka as make_kafka
from tests.brokers.rabbitmq_server import make_rabbitmq as make_rabbitmq
from tests.brokers.rabbitmq_server import rabbitmq_server as rabbitmq_server
from tests.brokers.sqs_server import sqs_server as sqs_server
