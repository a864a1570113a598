"""Other task systems on PostgreSQL, measured in the same run.

They live in an environment of their own (`venv.py`), never in ours: a script here runs there, and imports nothing of
holdfast. Each does the same: queue no-ops with the same argument, then one worker process works them off.
"""
