"""The ledger: remembers every move of every job, and the effects and steps of tasks."""
