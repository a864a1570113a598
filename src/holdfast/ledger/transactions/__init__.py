"""Transactions of operators, triggers and outbox, written once for every SQL store."""
