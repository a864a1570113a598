-- claimable: the head of the line, urgent jobs first; where one tenant has all jobs of a priority, as is most common.
-- Takes  :queue, :limit, :first, :second, :third (priorities in reading order)
-- Gives  work rows
SELECT json_group_array(json_array(
           id, job_id, job_type, tenant_id, idempotency_key, trace_id, state, attempt, place, deliveries, worker,
           claimed_at, created_at, run_at, last_seq, payload, meta))
  FROM (
    SELECT * FROM (
        SELECT id, job_id, job_type, tenant_id, idempotency_key, trace_id, state, attempt, place, deliveries, worker,
               claimed_at, created_at, run_at, last_seq, payload, meta
          FROM jobs
         WHERE queue = :queue AND priority = :first AND line IS NOT NULL
         ORDER BY tenant_id, line, state, id LIMIT :limit)
    UNION ALL
    SELECT * FROM (
        SELECT id, job_id, job_type, tenant_id, idempotency_key, trace_id, state, attempt, place, deliveries, worker,
               claimed_at, created_at, run_at, last_seq, payload, meta
          FROM jobs
         WHERE queue = :queue AND priority = :second AND line IS NOT NULL
         ORDER BY tenant_id, line, state, id LIMIT :limit)
    UNION ALL
    SELECT * FROM (
        SELECT id, job_id, job_type, tenant_id, idempotency_key, trace_id, state, attempt, place, deliveries, worker,
               claimed_at, created_at, run_at, last_seq, payload, meta
          FROM jobs
         WHERE queue = :queue AND priority = :third AND line IS NOT NULL
         ORDER BY tenant_id, line, state, id LIMIT :limit)
    LIMIT :limit)
 WHERE NOT EXISTS (SELECT 1 FROM queues WHERE queue = :queue AND paused)
