"""Revisions of the ledger's tables, one module each."""
