"""Retention on PostgreSQL: delete old jobs in small transactions (requirement L5).

Only the deleted rows are locked.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from holdfast.ledger.port.ledger import KEEP_ENTRIES_MS, PruneCursors
from holdfast.ledger.postgres.store import Connection, PostgresStore

#: The tenants of a table without reading the table: from one to the next in its primary key.
_TENANTS: Final = """
WITH RECURSIVE found AS (
    (SELECT tenant_id FROM {table} ORDER BY tenant_id LIMIT 1)
    UNION ALL
    SELECT (SELECT tenant_id FROM {table} WHERE tenant_id > found.tenant_id ORDER BY tenant_id LIMIT 1)
    FROM found WHERE found.tenant_id IS NOT NULL
)
SELECT tenant_id FROM found WHERE tenant_id IS NOT NULL
"""
_JOB_TENANTS: Final = _TENANTS.format(table="jobs")
_KEY_TENANTS: Final = _TENANTS.format(table="idempotency_keys")
_ANOMALY_TENANTS: Final = _TENANTS.format(table="anomalies")
_LOG_TENANTS: Final = _TENANTS.format(table="operator_events")
_EXECUTION_TENANTS: Final = _TENANTS.format(table="queue_executions")
#: How often in a row a batch may search and find only jobs that are kept.
_MAX_SEARCHES: Final = 50
_BEGINNING: Final = (datetime(1970, 1, 1, tzinfo=UTC), "")

#: Reads the oldest jobs after the cursor in the order of an index, and no more than it checks: with a condition that
#: few rows seem to meet, the planner would read and sort all old jobs for each batch. `created_at` is never later than
#: `finished_at`. Then selects those that may be deleted: `(SELECT … LIMIT 1) IS NULL` is a NOT EXISTS that does not
#: read a whole table. `last_seq` is the number of a job's events; it limits the transaction even if histories are long.
#: The cursor moves to the last job that was checked, or, if not all could be deleted at once, to the last that was
#: deleted.
PRUNE_JOBS: Final = """
WITH checked AS MATERIALIZED (
    SELECT tenant_id, job_id, queue, created_at FROM jobs
    WHERE tenant_id = $1 AND created_at < now() - $2::interval AND created_at >= $3 AND (created_at, job_id) > ($3, $4)
    ORDER BY created_at, job_id LIMIT {jobs}
), old AS MATERIALIZED (
    SELECT j.tenant_id, j.job_id, j.queue, j.created_at, j.last_seq
      FROM checked l JOIN jobs j ON j.tenant_id = l.tenant_id AND j.job_id = l.job_id AND j.queue = l.queue
     WHERE j.finished_at < now() - $2::interval
       AND (SELECT 1 FROM dlq_items d WHERE d.tenant_id = j.tenant_id AND d.job_id = j.job_id AND d.queue = j.queue
               AND (d.status IN ('open', 'discard_requested') OR d.replay_pending = 1) LIMIT 1) IS NULL
       AND (SELECT 1 FROM idempotency_keys k WHERE k.tenant_id = j.tenant_id AND k.job_id = j.job_id
               AND k.queue = j.queue AND k.state <> 'done' LIMIT 1) IS NULL
       FOR UPDATE OF j SKIP LOCKED
), gone AS MATERIALIZED (
    SELECT tenant_id, job_id, queue, created_at FROM (
        SELECT *, sum(last_seq) OVER (ORDER BY created_at, job_id, queue) - last_seq AS before FROM old
    ) counted WHERE before < {events}
), events AS (
    DELETE FROM job_events t USING gone g
    WHERE t.tenant_id = g.tenant_id AND t.job_id = g.job_id AND t.queue = g.queue RETURNING 1
), steps AS (
    DELETE FROM job_steps t USING gone g
    WHERE t.tenant_id = g.tenant_id AND t.job_id = g.job_id AND t.queue = g.queue RETURNING 1
), dead_letters AS (
    DELETE FROM dlq_items t USING gone g
    WHERE t.tenant_id = g.tenant_id AND t.job_id = g.job_id AND t.queue = g.queue RETURNING 1
), decisions AS (
    DELETE FROM approvals t USING gone g
    WHERE t.tenant_id = g.tenant_id AND t.job_id = g.job_id AND t.queue = g.queue RETURNING t.tenant_id, t.approval_id
), votes AS (
    DELETE FROM approval_votes t USING decisions d
    WHERE t.tenant_id = d.tenant_id AND t.approval_id = d.approval_id RETURNING 1
), oddities AS (
    DELETE FROM anomalies t USING gone g
    WHERE t.tenant_id = g.tenant_id AND t.job_id = g.job_id AND t.queue = g.queue RETURNING 1
), jobs_gone AS (
    DELETE FROM jobs t USING gone g
    WHERE t.tenant_id = g.tenant_id AND t.job_id = g.job_id AND t.queue = g.queue RETURNING 1
)
SELECT (SELECT count(*) FROM jobs_gone) + (SELECT count(*) FROM events) + (SELECT count(*) FROM steps)
     + (SELECT count(*) FROM dead_letters) + (SELECT count(*) FROM decisions) + (SELECT count(*) FROM votes)
     + (SELECT count(*) FROM oddities) AS gone,
       part OR (SELECT count(*) FROM checked) = {jobs} AS more,
       last.created_at, last.job_id, now() - $2::interval AS before
  FROM (SELECT (SELECT count(*) FROM gone) < (SELECT count(*) FROM old) AS part) one
  LEFT JOIN LATERAL (
      SELECT created_at, job_id FROM (
          SELECT created_at, job_id FROM gone WHERE part UNION ALL SELECT created_at, job_id FROM checked WHERE NOT part
      ) passed ORDER BY created_at DESC, job_id DESC LIMIT 1
  ) last ON true
"""

#: Anomalies of jobs that are not in the ledger; the others are deleted with their job.
PRUNE_ANOMALIES: Final = """
WITH gone AS (
    SELECT tenant_id, id FROM anomalies a
    WHERE tenant_id = $1 AND at < now() - $2::interval
      AND (SELECT 1 FROM jobs j WHERE j.tenant_id = a.tenant_id AND j.job_id = a.job_id AND j.queue = a.queue
            LIMIT 1) IS NULL
    ORDER BY at LIMIT $3 FOR UPDATE SKIP LOCKED
), dropped AS (
    DELETE FROM anomalies a USING gone g WHERE a.tenant_id = g.tenant_id AND a.id = g.id RETURNING 1
)
SELECT count(*) FROM dropped
"""

PRUNE_LOG: Final = """
WITH gone AS (
    SELECT tenant_id, id FROM operator_events
    WHERE tenant_id = $1 AND at < now() - $2::interval ORDER BY at LIMIT $3 FOR UPDATE SKIP LOCKED
), dropped AS (
    DELETE FROM operator_events e USING gone g WHERE e.tenant_id = g.tenant_id AND e.id = g.id RETURNING 1
)
SELECT count(*) FROM dropped
"""

#: Executions of triggers.
PRUNE_EXECUTIONS: Final = """
WITH gone AS (
    SELECT tenant_id, id FROM queue_executions
    WHERE tenant_id = $1 AND started_at < now() - $2::interval ORDER BY started_at LIMIT $3 FOR UPDATE SKIP LOCKED
), dropped AS (
    DELETE FROM queue_executions e USING gone g WHERE e.tenant_id = g.tenant_id AND e.id = g.id RETURNING 1
)
SELECT count(*) FROM dropped
"""

#: Sent events of all tenants at once; waiting and dead ones are kept.
PRUNE_OUTBOX: Final = """
WITH gone AS (
    SELECT position FROM outbox_events
    WHERE status = 'SENT' AND sent_at < now() - $1::interval ORDER BY sent_at LIMIT $2 FOR UPDATE SKIP LOCKED
), dropped AS (
    DELETE FROM outbox_events e USING gone g WHERE e.position = g.position RETURNING 1
)
SELECT count(*) FROM dropped
"""

PRUNE_KEYS: Final = """
WITH gone AS (
    SELECT tenant_id, key FROM idempotency_keys
    WHERE tenant_id = $1 AND expires_at < now() AND state = 'done'
    ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED
), dropped AS (
    DELETE FROM idempotency_keys k USING gone g WHERE k.tenant_id = g.tenant_id AND k.key = g.key RETURNING 1
)
SELECT count(*) FROM dropped
"""

#: The entry that the position points at proves the feed's identity, however old it is.
PRUNE_ENTRIES: Final = """
WITH gone AS (
    SELECT e.feed, e.position, e.nonce FROM feed_entries e JOIN feed_positions p USING (feed)
    WHERE e.feed = $1 AND e.at < now() - $2::interval AND e.position <> p.position
    ORDER BY e.at LIMIT $3 FOR UPDATE OF e SKIP LOCKED
), dropped AS (
    DELETE FROM feed_entries e USING gone g
    WHERE e.feed = g.feed AND e.position = g.position AND e.nonce = g.nonce RETURNING 1
)
SELECT count(*) FROM dropped
"""


async def prune(store: PostgresStore, keep_ms: int, limit: int, marks: PruneCursors | None = None) -> int:
    """Delete about `limit` rows; return how many were deleted."""
    keep, entries = timedelta(milliseconds=keep_ms), timedelta(milliseconds=max(keep_ms, KEEP_ENTRIES_MS))

    # Most jobs have four rows.
    jobs = max(1, limit // 4)
    prune_jobs = PRUNE_JOBS.format(jobs=jobs, events=max(1, limit - jobs))

    moved: PruneCursors = {}

    async def work(connection: Connection) -> int:
        gone = 0
        reached = marks or {}
        tenants = [tenant for (tenant,) in await connection.fetch(_JOB_TENANTS)]
        # The tenant furthest behind comes first: one that always has more would starve the others.
        for tenant in sorted(tenants, key=lambda tenant: reached.get(tenant, _BEGINNING)):
            start, more = reached.get(tenant, _BEGINNING), True
            # Skip jobs that are kept until some are found that are not.
            for _ in range(_MAX_SEARCHES):
                if not more or gone >= max(1, limit // 2):
                    break
                (row,) = await connection.fetch(prune_jobs, tenant, keep, *start)
                gone, more = gone + row["gone"], row["more"]
                start = moved[tenant] = (row["created_at"], row["job_id"]) if more else (row["before"], "")
        for (tenant,) in await connection.fetch(_ANOMALY_TENANTS):
            if gone < limit:
                gone += await connection.fetchval(PRUNE_ANOMALIES, tenant, keep, limit - gone)
        for (tenant,) in await connection.fetch(_LOG_TENANTS):
            if gone < limit:
                gone += await connection.fetchval(PRUNE_LOG, tenant, keep, limit - gone)
        for (tenant,) in await connection.fetch(_EXECUTION_TENANTS):
            if gone < limit:
                gone += await connection.fetchval(PRUNE_EXECUTIONS, tenant, keep, limit - gone)
        if gone < limit:
            gone += await connection.fetchval(PRUNE_OUTBOX, keep, limit - gone)
        for (tenant,) in await connection.fetch(_KEY_TENANTS):
            if gone < limit:
                gone += await connection.fetchval(PRUNE_KEYS, tenant, limit - gone)
        for (feed,) in await connection.fetch("SELECT feed FROM feed_positions"):
            if gone < limit:
                gone += await connection.fetchval(PRUNE_ENTRIES, feed, entries, limit - gone)
        return gone

    gone = await store.transact(work)
    if marks is not None:
        marks.update(moved)
    return gone
