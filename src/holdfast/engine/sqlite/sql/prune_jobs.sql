-- prune_jobs: finished jobs past their time.
-- Takes  :ids (a JSON list)
DELETE FROM jobs WHERE id IN (SELECT value FROM json_each(:ids)) AND finished_at IS NOT NULL
