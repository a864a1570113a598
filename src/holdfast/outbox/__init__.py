"""Outbox: events written in the user's transaction and published by a relay after the commit."""
