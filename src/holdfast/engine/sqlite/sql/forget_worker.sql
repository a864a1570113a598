-- forget_worker: a worker is gone; it stays known while it holds leases.
-- Takes  :worker, :queue
DELETE FROM workers
 WHERE worker = :worker AND queue = :queue AND NOT EXISTS (
    SELECT 1 FROM jobs
     WHERE jobs.queue = :queue AND lease_until IS NOT NULL AND state = 'running' AND jobs.worker = :worker)
