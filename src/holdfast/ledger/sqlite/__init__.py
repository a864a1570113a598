"""The ledger on SQLite: in its own file, or embedded in the engine's."""
