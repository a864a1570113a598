"""prune, and the ledger's end of the feed."""

from __future__ import annotations

from typing import Final

from holdfast.engine.sqlite.policy import Policy
from holdfast.engine.sqlite.rows import IDS
from holdfast.engine.sqlite.transaction import Transaction, json_list
from holdfast.errors import InvalidOption

#: Rows that go in one step: small, so that nobody waits long behind it.
PRUNE_BATCH: Final = 200
#: A worker that has not been seen for so many leases is gone.
_LEASES_TO_FORGET: Final = 4


def prune_jobs(transaction: Transaction, policy: Policy, queue: str) -> int:
    """Some finished jobs past their time, with their events. Lazy. Call again while it gives `PRUNE_BATCH`."""
    before = policy.clock.now_ms() - policy.options.finished_ttl_ms
    if not transaction.rows("expired", IDS, queue=queue, before=before, limit=1):
        return 0
    transaction.begin()
    expired = transaction.rows("expired", IDS, queue=queue, before=before, limit=PRUNE_BATCH)
    ids = json_list(expired)
    transaction.run("prune_events", ids=ids)
    return transaction.run("prune_jobs", ids=ids)


def prune_keys(transaction: Transaction, policy: Policy, queue: str) -> int:
    """Some idempotency keys past their window. Call again while it gives `PRUNE_BATCH`."""
    transaction.begin()
    return transaction.run("prune_keys", queue=queue, now=policy.clock.now_ms(), limit=PRUNE_BATCH)


def prune_rest(transaction: Transaction, policy: Policy, queue: str) -> int:
    """Workers that are gone, and entries of a feed that nobody reads."""
    before = policy.clock.now_ms() - _LEASES_TO_FORGET * policy.options.visibility_timeout_ms
    gone = transaction.run("forget_workers", queue=queue, before=before)
    gone += transaction.run("feed_trim", queue=queue, limit=policy.options.feed_limit)
    return gone + transaction.run("prune_feed", queue=queue)


def register_reader(transaction: Transaction, policy: Policy, queue: str) -> None:
    transaction.run("register_reader", queue=queue, now=policy.clock.now_ms())


def forget(transaction: Transaction, queue: str, position: str) -> None:
    """The reader has everything before this position."""
    at = parse_position(position)
    transaction.run("forget", queue=queue, position=at)
    transaction.run("read_to", queue=queue, position=at)


def leave(transaction: Transaction, worker: str, queues: list[str]) -> None:
    for queue in queues:
        transaction.run("forget_worker", worker=worker, queue=queue)


def parse_position(position: str) -> int:
    """A position in the feed; empty is before the first."""
    if not position:
        return 0
    if not position.isdecimal():
        raise InvalidOption(f"{position!r} is no position in this feed")
    return int(position)
