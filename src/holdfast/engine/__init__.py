"""The engine port and its two adapters, Redis and SQLite."""
