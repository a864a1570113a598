-- find: some jobs in these states, the newest first. One arm for each index, so that none reads the whole table.
-- Takes  :queue, :states (a JSON list), :limit, :expired (jobs that ended by then are gone)
-- Gives  view rows
SELECT json_group_array(json_array(
           id, job_id, job_type, queue, tenant_id, state, attempt, payload, idempotency_key, trace_id, meta, created_at,
           worker, result, error_code, last_error, due_at, next_retry_at, finished_at))
  FROM (
    SELECT * FROM jobs
     WHERE id IN (
        SELECT id FROM (
            SELECT id FROM jobs
             WHERE queue = :queue AND line IS NOT NULL AND state IN (SELECT value FROM json_each(:states))
             ORDER BY id DESC LIMIT :limit)
        UNION ALL SELECT id FROM (
            SELECT id FROM jobs
             WHERE queue = :queue AND due_at IS NOT NULL AND state IN (SELECT value FROM json_each(:states))
             ORDER BY id DESC LIMIT :limit)
        UNION ALL SELECT id FROM (
            SELECT id FROM jobs
             WHERE queue = :queue AND lease_until IS NOT NULL AND state IN (SELECT value FROM json_each(:states))
             ORDER BY id DESC LIMIT :limit)
        UNION ALL SELECT id FROM (
            SELECT id FROM jobs
             WHERE queue = :queue AND state IN ({{aside}}) AND state IN (SELECT value FROM json_each(:states))
             ORDER BY id DESC LIMIT :limit)
        UNION ALL SELECT id FROM (
            SELECT id FROM jobs
             WHERE queue = :queue AND finished_at IS NOT NULL AND finished_at > :expired
               AND state IN (SELECT value FROM json_each(:states))
             ORDER BY finished_at DESC LIMIT :limit))
     ORDER BY id DESC LIMIT :limit)
