"""Texts of the page about the peers."""

from __future__ import annotations

from typing import Final

BEFORE: Final = """\
Written by `python -m benchmarks.versus` from a run of `make bench-peers`; the method: \
[here](README.md#compared-with-other-task-systems). holdfast runs at default settings, on Redis alone and with its \
ledger in PostgreSQL (the worker is also the projector). Peers run at the best settings that were found for each, \
with results off."""

NOTHING_AHEAD: Final = "No peer is ahead in any measure of this run."

AFTER: Final = """\
## What is not compared

Most peers do less for each job than holdfast does in these figures:

- **Results** are off at every peer that can turn them off; holdfast keeps each result.
- **Leases**: holdfast leases each job, fences it by its delivery count and settles it against that lease. Peers on
  Redis lists pop a job before it runs (the kill table shows what a crash then loses), or keep a separate copy without a
  fence.
- **Audit**: holdfast writes every move to its feed and, with the ledger, to PostgreSQL. Of the peers only pgqueuer,
  procrastinate and DBOS keep a history, in the same store as their jobs.
- **Lost** jobs are those that had not finished 60 s after the kill. Some peers deliver such a job again later, after
  their own default timeouts: streaq and dramatiq after a minute, docket and arq after five, taskiq after ten. celery
  does so after an hour for jobs that it had fetched and not started.
- Retries with backoff, dead letters, idempotency keys, priorities and fair shares for tenants are on in holdfast; no-op
  jobs do not exercise them in any system.

What holdfast does not do, or what others do better:

- holdfast needs Redis or SQLite as its engine. With PostgreSQL alone, procrastinate, pgqueuer and DBOS need one server
  less.
- There is no choice of result backends, brokers or serializers. celery, dramatiq and taskiq also run on RabbitMQ.
- There is no canvas of chords and groups (celery), and there are no workflows as ordinary code that are replayed
  (DBOS). holdfast has steps.
- A finished job whose verdict had not been settled when the worker was killed runs again: at least once, as in all
  systems here.
- After kill -9 a job waits until its lease has expired (30 s by default). Peers with a shorter timeout recover sooner;
  holdfast's timeout can be shortened too (`HOLDFAST_VISIBILITY_TIMEOUT_S`)."""

HOW: Final = """\
## How to reproduce

    make bench-peers                                     everything, about 25 minutes
    make bench-peers ARGS="--peers huey,saq --rounds 1"  a part of it
    python -m benchmarks.versus benchmarks/results/bench-….json --page docs/benchmarks/peers-2026-11.md

Every figure of every round is stored next to this page as JSON.

Peers are installed at pinned versions into separate environments under `.servers/peers` when first needed. \
A peer that cannot be installed, or fails, is named, and the run continues without it."""
