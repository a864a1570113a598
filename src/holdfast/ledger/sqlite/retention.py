"""Retention on SQLite: delete old jobs in small operations of the writer (requirement L5).

Other writes wait only for one such operation.
"""

from __future__ import annotations

from typing import Final

from holdfast.ledger.port.ledger import KEEP_ENTRIES_MS, PruneCursors
from holdfast.sqlite.transaction import Transaction

_TENANTS: Final = """
WITH RECURSIVE found(tenant_id) AS (
    SELECT min(tenant_id) FROM {table}
    UNION ALL
    SELECT (SELECT min(tenant_id) FROM {table} WHERE tenant_id > found.tenant_id)
    FROM found WHERE found.tenant_id IS NOT NULL
)
SELECT tenant_id FROM found WHERE tenant_id IS NOT NULL
"""
_JOB_TENANTS: Final = _TENANTS.format(table="jobs")
_KEY_TENANTS: Final = _TENANTS.format(table="idempotency_keys")
_ANOMALY_TENANTS: Final = _TENANTS.format(table="anomalies")
_LOG_TENANTS: Final = _TENANTS.format(table="operator_events")
_EXECUTION_TENANTS: Final = _TENANTS.format(table="queue_executions")

#: Rows per operation, which takes about 30 ms and blocks other writes.
_MOST_ROWS: Final = 2_000

_OLD_JOBS: Final = """
SELECT tenant_id, job_id, queue, created_at FROM (
    SELECT tenant_id, job_id, queue, created_at,
           sum(last_seq) OVER (ORDER BY created_at, job_id, queue) - last_seq AS before FROM (
        SELECT tenant_id, job_id, queue, created_at, last_seq FROM jobs
        WHERE tenant_id = ?1 AND created_at < ?2 AND finished_at < ?2
          AND created_at >= ?4 AND (created_at, job_id) > (?4, ?5)
          AND NOT EXISTS (
              SELECT 1 FROM dlq_items d WHERE d.tenant_id = jobs.tenant_id AND d.job_id = jobs.job_id
                 AND d.queue = jobs.queue AND (d.status IN ('open', 'discard_requested') OR d.replay_pending = 1))
          AND NOT EXISTS (
              SELECT 1 FROM idempotency_keys k WHERE k.tenant_id = jobs.tenant_id AND k.job_id = jobs.job_id
                 AND k.queue = jobs.queue AND k.state <> 'done')
        ORDER BY created_at, job_id LIMIT ?3
    )
) WHERE before < ?3
"""
_OF_A_JOB: Final = ("job_events", "job_steps", "dlq_items", "approvals", "anomalies", "jobs")
_DROP: Final = (
    """
    DELETE FROM approval_votes WHERE (tenant_id, approval_id) IN (
        SELECT tenant_id, approval_id FROM approvals WHERE tenant_id = ? AND job_id = ? AND queue = ?)
    """,
    *(
        f"DELETE FROM {table} WHERE tenant_id = ? AND job_id = ? AND queue = ?"  # noqa: S608 - constants
        for table in _OF_A_JOB
    ),
)
_PRUNE_LOG: Final = """
DELETE FROM operator_events WHERE rowid IN (
    SELECT rowid FROM operator_events WHERE tenant_id = ?1 AND at < ?2 ORDER BY at LIMIT ?3)
"""
#: Executions of triggers.
_PRUNE_EXECUTIONS: Final = """
DELETE FROM queue_executions WHERE rowid IN (
    SELECT rowid FROM queue_executions WHERE tenant_id = ?1 AND started_at < ?2 ORDER BY started_at LIMIT ?3)
"""
#: Sent events of all tenants at once; waiting and dead ones are kept.
_PRUNE_OUTBOX: Final = """
DELETE FROM outbox_events WHERE position IN (
    SELECT position FROM outbox_events WHERE status = 'SENT' AND sent_at < ?1 ORDER BY sent_at LIMIT ?2)
"""
_PRUNE_KEYS: Final = """
DELETE FROM idempotency_keys WHERE rowid IN (
    SELECT rowid FROM idempotency_keys
    WHERE tenant_id = ?1 AND expires_at IS NOT NULL AND expires_at < ?2 AND state = 'done' ORDER BY expires_at LIMIT ?3)
"""
#: Anomalies of jobs that are not in the ledger; the others are deleted with their job.
_PRUNE_ANOMALIES: Final = """
DELETE FROM anomalies WHERE rowid IN (
    SELECT rowid FROM anomalies a WHERE tenant_id = ?1 AND at < ?2
       AND NOT EXISTS (
           SELECT 1 FROM jobs j WHERE j.tenant_id = a.tenant_id AND j.job_id = a.job_id AND j.queue = a.queue)
     ORDER BY at LIMIT ?3)
"""
_PRUNE_ENTRIES: Final = """
DELETE FROM feed_entries WHERE rowid IN (
    SELECT e.rowid FROM feed_entries e JOIN feed_positions p USING (feed)
    WHERE e.feed = ?1 AND e.at < ?2 AND e.position <> p.position ORDER BY e.at LIMIT ?3)
"""


def prune(transaction: Transaction, now_ms: int, keep_ms: int, limit: int, marks: PruneCursors | None = None) -> int:
    """Delete about `limit` rows; return how many were deleted."""
    gone, old, limit = 0, now_ms - keep_ms, min(limit, _MOST_ROWS)
    marks = {} if marks is None else marks
    tenants = [tenant for (tenant,) in transaction.execute(_JOB_TENANTS).fetchall()]
    # The tenant furthest behind comes first: one that always has more would starve the others.
    for tenant in sorted(tenants, key=lambda tenant: marks.get(tenant, (0, ""))):
        start = marks.get(tenant, (0, ""))
        for *job, created_at in transaction.execute(_OLD_JOBS, (tenant, old, limit - gone, *start)).fetchall():
            gone += sum(transaction.execute(statement, job).rowcount for statement in _DROP)
            marks[tenant] = (created_at, job[1])
        if gone >= limit:
            return gone
        # Fewer rows than the limit were deleted, and a job has at least two: all old jobs were read.
        marks[tenant] = (old, "")
    for (tenant,) in transaction.execute(_ANOMALY_TENANTS).fetchall():
        gone += transaction.execute(_PRUNE_ANOMALIES, (tenant, old, max(0, limit - gone))).rowcount
    for (tenant,) in transaction.execute(_LOG_TENANTS).fetchall():
        gone += transaction.execute(_PRUNE_LOG, (tenant, old, max(0, limit - gone))).rowcount
    for (tenant,) in transaction.execute(_EXECUTION_TENANTS).fetchall():
        gone += transaction.execute(_PRUNE_EXECUTIONS, (tenant, old, max(0, limit - gone))).rowcount
    gone += transaction.execute(_PRUNE_OUTBOX, (old, max(0, limit - gone))).rowcount
    gone += prune_keys(transaction, now_ms, max(0, limit - gone))
    before = now_ms - max(keep_ms, KEEP_ENTRIES_MS)
    for (feed,) in transaction.execute("SELECT feed FROM feed_positions").fetchall():
        gone += transaction.execute(_PRUNE_ENTRIES, (feed, before, max(0, limit - gone))).rowcount
    return gone


def prune_keys(transaction: Transaction, now_ms: int, limit: int) -> int:
    """Delete effect keys that have expired; return how many were deleted."""
    gone = 0
    for (tenant,) in transaction.execute(_KEY_TENANTS).fetchall():
        gone += transaction.execute(_PRUNE_KEYS, (tenant, now_ms, max(0, limit - gone))).rowcount
    return gone
