"""Observability: counters, metrics, tracing, logs and redaction."""
