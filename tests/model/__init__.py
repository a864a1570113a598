"""A model of engine, ledger and feed in which either store goes back in time, explored exhaustively.

`test_epochs.py` explores the smaller scenarios. `python -m tests.model` explores all of them and prints traces.
"""
