"""Documents into a vector store, reliably: over Redis Streams, or over an outbox and Kafka."""
