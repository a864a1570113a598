-- start: lease jobs from the line, or retries due in the pending list; `early`: wherever they wait. Counted here, not at
-- failure: a worker that dies never reports.
-- Takes  :ids (a JSON list), :worker, :now, :until, :early (0|1)
UPDATE jobs
   SET came_from = state, state = 'running', attempt = attempt + 1, place = place + 1, deliveries = 1, worker = :worker,
       claimed_at = :now, lease_until = :until, line = NULL, due_at = NULL, next_retry_at = NULL, last_seq = last_seq + 1,
       -- One that was taken before its time does not go back to waiting for it.
       run_at = min(run_at, :now), updated_at = :now
 WHERE id IN (SELECT value FROM json_each(:ids)) AND state IN ({{into running}})
   AND (line IS NOT NULL OR lease_until <= :now OR :early)
