"""prune, and who reads the feed."""

from __future__ import annotations

from typing import Final

from holdfast.engine.sqlite.policy import Policy
from holdfast.engine.sqlite.reader import Reader
from holdfast.engine.sqlite.rows import IDS
from holdfast.engine.sqlite.transaction import Transaction, json_list
from holdfast.errors import InvalidOption

#: Rows that go in one step: small, so that nobody waits long behind it.
PRUNE_BATCH: Final = 200
#: A worker that has not been seen for so many leases is gone.
_LEASES_TO_FORGET: Final = 4


async def expired_jobs(reader: Reader, policy: Policy, queue: str) -> list[int]:
    """Some finished jobs that may go; fewer than `PRUNE_BATCH` are the last ones."""
    return await reader.rows("expired", IDS, queue=queue, before=_expired_ms(policy), limit=PRUNE_BATCH)


def prune_jobs(transaction: Transaction, policy: Policy, queue: str, found: list[int]) -> int:
    """Drop these finished jobs with all that belongs to them; how many went.

    One stays while somebody has yet to deal with its dead letter, or an effect of it is reserved or in doubt.
    """
    expired = transaction.rows("unneeded", IDS, queue=queue, before=_expired_ms(policy), ids=json_list(found))
    ids = json_list(expired)
    for step in ("events", "steps", "letters", "votes", "approvals", "anomalies"):
        transaction.run(f"prune_{step}", ids=ids)
    return transaction.run("prune_jobs", ids=ids)


def _expired_ms(policy: Policy) -> int:
    return policy.clock.now_ms() - policy.options.finished_ttl_ms


def prune_keys(transaction: Transaction, policy: Policy, queue: str) -> int:
    """Some idempotency keys past their window. Call again while it gives `PRUNE_BATCH`."""
    transaction.begin()
    return transaction.run("prune_keys", queue=queue, now=policy.clock.now_ms(), limit=PRUNE_BATCH)


def prune_effects(transaction: Transaction, policy: Policy) -> int:
    """Some keys of effects that may be used again. Call again while it gives `PRUNE_BATCH`."""
    transaction.begin()
    return transaction.run("prune_effects", now=policy.clock.now_ms(), limit=PRUNE_BATCH)


def prune_log(transaction: Transaction, policy: Policy) -> int:
    """Some of what operators did long ago. Call again while it gives `PRUNE_BATCH`."""
    transaction.begin()
    return transaction.run("prune_log", before=_expired_ms(policy), limit=PRUNE_BATCH)


def prune_messages(transaction: Transaction, policy: Policy) -> int:
    """Some of what was sent, and became of messages, long ago. Call again while it gives `PRUNE_BATCH`."""
    transaction.begin()
    before = _expired_ms(policy)
    gone = transaction.run("prune_outbox", before=before, limit=PRUNE_BATCH)
    return gone + transaction.run("prune_executions", before=before, limit=max(0, PRUNE_BATCH - gone))


def prune_audits(transaction: Transaction, policy: Policy, queue: str) -> int:
    """The same in the feed. Call again while it gives `PRUNE_BATCH`."""
    transaction.begin()
    return transaction.run("prune_audits", queue=queue, before=_expired_ms(policy), limit=PRUNE_BATCH)


def prune_rest(transaction: Transaction, policy: Policy, queue: str) -> int:
    """Workers that are gone, and entries of a feed that nobody reads."""
    before = policy.clock.now_ms() - _LEASES_TO_FORGET * policy.options.visibility_timeout_ms
    gone = transaction.run("forget_workers", queue=queue, before=before)
    gone += transaction.run("feed_trim", queue=queue, limit=policy.options.feed_limit)
    return gone + transaction.run("prune_feed", queue=queue)


def register_reader(transaction: Transaction, policy: Policy, queue: str) -> None:
    transaction.run("register_reader", queue=queue, now=policy.clock.now_ms())


def forget(transaction: Transaction, policy: Policy, queue: str, position: str) -> None:
    """The reader has everything before this position; a tail of it is kept for those who look over its shoulder."""
    at = parse_position(position)
    transaction.run("forget", queue=queue, position=at, tail=policy.options.feed_tail)
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
