"""How fast holdfast is, measured beside a bare Redis loop: `python -m benchmarks`.

options   what was asked for
machine   the machine: held awake, calibrated, described
stores    Redis and SQLite, fresh for every probe
sides     code of the contestants; each runs in processes of its own
children  the parent's end of those processes
stages    what is measured: submit, drain, latency, backlog
run       rounds, interleaved
report    tables and JSON; `plot` the picture
"""
