"""Broker clients, shared by triggers (messages in) and the outbox (events out)."""
