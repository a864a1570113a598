"""`holdfast demo`: a few hundred jobs on one SQLite file, two workers, one of them killed with -9, two operators.

`orders` is the app. `scenario` submits, kills and waits; `check` then compares every job with its expected outcome.
"""
