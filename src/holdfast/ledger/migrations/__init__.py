"""Alembic migrations of the ledger. Run by `holdfast migrate`; there is no alembic.ini."""
