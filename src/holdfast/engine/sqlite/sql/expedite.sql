-- expedite: a job that waits for its time is due now.
-- Takes  :id, :now
UPDATE jobs
   SET due_at = min(due_at, :now), lease_until = min(lease_until, :now), run_at = min(run_at, :now),
       next_retry_at = min(next_retry_at, :now), last_seq = last_seq + 1, updated_at = :now
 WHERE id = :id AND (due_at IS NOT NULL OR state = 'retrying' AND lease_until IS NOT NULL)
