"""What operators see: counts now; metrics, tracing and logs as they are built."""
