"""`holdfast demo`: a few hundred jobs on one SQLite file, two workers and two operators.

One of the workers is killed with SIGKILL. `orders` is the app. `scenario` submits, kills and waits; `check` then
compares every job with its expected outcome.
"""
