"""Fuzzing of every parser: a byte-level mutation fuzzer, and Hypothesis.

`python -m tests.fuzz --cases 1000000 --seed 7` runs a million cases; `--target NAME --case N` repeats one.
"""
