-- forget_workers: workers that nobody has seen for long and that hold no leases.
-- Takes  :queue, :before
DELETE FROM workers
 WHERE queue = :queue AND seen_at < :before AND NOT EXISTS (
    SELECT 1 FROM jobs
     WHERE jobs.queue = workers.queue AND lease_until IS NOT NULL AND state = 'running' AND jobs.worker = workers.worker)
