"""The ledger on SQLite: in a file of its own, or embedded in the engine's."""
