"""Triggers: start a run for each message of a broker queue."""
