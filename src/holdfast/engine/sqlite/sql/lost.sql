-- lost: leases that have run out, and retries due in the pending list.
-- Takes  :queue, :now, :limit
-- Gives  work rows
SELECT json_group_array(json_array(
           id, job_id, job_type, tenant_id, idempotency_key, trace_id, state, attempt, place, deliveries, worker,
           claimed_at, created_at, run_at, last_seq, payload, meta))
  FROM (
    SELECT * FROM jobs
     WHERE queue = :queue AND lease_until IS NOT NULL AND lease_until <= :now
       AND NOT EXISTS (SELECT 1 FROM queues WHERE queue = :queue AND paused)
     ORDER BY lease_until, id LIMIT :limit)
