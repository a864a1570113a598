"""What operators do with jobs, queues and messages, with permission checks and audit (D3–D6, H5, H6)."""
