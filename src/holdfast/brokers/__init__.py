"""One thin client per broker, used by triggers (messages in) and the outbox (events out) alike."""
