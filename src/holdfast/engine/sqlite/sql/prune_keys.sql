-- prune_keys: keys past their window, unless their job is still open.
-- Takes  :queue, :now, :limit
DELETE FROM submission_keys
 WHERE (tenant_id, queue, key) IN (
    SELECT tenant_id, queue, key FROM submission_keys AS old
     WHERE old.queue = :queue AND old.expires_at <= :now AND NOT EXISTS (
        SELECT 1 FROM jobs WHERE jobs.queue = old.queue AND jobs.job_id = old.job_id AND finished_at IS NULL)
     LIMIT :limit)
