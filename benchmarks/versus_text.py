"""What the page about the peers says in words, beside its figures."""

from __future__ import annotations

from typing import Final

BEFORE: Final = """\
Written by `python -m benchmarks.versus` from a run of `make bench-peers`; how it is measured: \
[here](README.md#beside-other-task-systems). holdfast runs at default settings, on Redis alone and with its ledger in \
PostgreSQL (a worker projects by itself). Peers run at the best settings that were found for each, results off."""

NOTHING_AHEAD: Final = "In no measure of this run."

AFTER: Final = """\
## What is not compared

Most peers do less for each job than holdfast does in these figures:

- **Results** are off at every peer that can turn them off; holdfast keeps each result.
- **Leases**: a job at holdfast is leased, fenced by its delivery and settled against that lease. Peers on Redis lists
  pop a job before it runs (what a crash then loses is in the table of the kill), or keep a copy aside without a fence.
- **Audit**: holdfast writes every move to its feed, with the ledger to PostgreSQL. Of the peers only pgqueuer,
  procrastinate and DBOS keep a history, in the store that they have their jobs in.
- **Lost** is what had not finished 60 s after the kill. By their own default timeouts some peers give such a job out
  again later: streaq and dramatiq after a minute, docket and arq after five, taskiq after ten, celery after an hour
  what it had fetched and not begun.
- Retries with back-off, dead letters, idempotency keys, priorities and fair turns of tenants are on at holdfast; no-ops
  do not exercise them, anywhere.

And what holdfast does not do, or others do better:

- It needs Redis or SQLite as its engine: with PostgreSQL alone procrastinate, pgqueuer and DBOS are one server less.
- No result backends, brokers or serializers to choose from: celery, dramatiq and taskiq run on RabbitMQ, too.
- No canvas of chords and groups (celery), no workflows as ordinary code that are replayed (DBOS); it has steps.
- A finished job whose verdict had not been settled when the worker died runs again: at least once, as everywhere here.
- After kill -9 a job waits until its lease has run out (30 s by default). Peers whose timeout is set shorter are
  sooner; holdfast's can be set shorter, too (`HOLDFAST_VISIBILITY_TIMEOUT_S`)."""

HOW: Final = """\
## How it was made

    make bench-peers                                     everything, about 25 minutes
    make bench-peers ARGS="--peers huey,saq --rounds 1"  a part of it
    python -m benchmarks.versus benchmarks/results/bench-….json --page docs/benchmarks/peers-2026-11.md

Every figure of every round lies beside this page, as JSON.

Peers are installed into environments of their own under `.servers/peers`, with pinned versions, when first needed. \
One that cannot be installed, or fails, is named, and the run goes on without it."""
