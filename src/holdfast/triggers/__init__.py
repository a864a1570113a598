"""Messages of brokers become jobs."""
