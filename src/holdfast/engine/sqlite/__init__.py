"""The embedded engine: one SQLite file, the same semantics as on Redis, and no server."""
