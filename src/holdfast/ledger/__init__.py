"""The ledger: the history of every job, queries on it, and the effects and steps of tasks."""
