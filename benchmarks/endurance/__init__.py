"""A long run at a share of the top rate: does anything grow? `python -m benchmarks.endurance`.

jobs        what the workers run
submitter   who submits it, flat out or at a pace
deployment  the processes: Redis with AOF, PostgreSQL, two workers, upkeep
watch       what is looked at every few seconds
verdict     flat or growing: the rule
page        the page and the picture
run         the command
"""
