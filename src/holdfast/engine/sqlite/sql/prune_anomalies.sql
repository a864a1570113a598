-- prune_anomalies: the anomalies of pruned jobs go with them. Before the jobs do.
-- Takes  :ids (a JSON list of the jobs' rows)
DELETE FROM anomalies
 WHERE (tenant_id, job_id, queue) IN (
    SELECT tenant_id, job_id, queue FROM jobs WHERE id IN (SELECT value FROM json_each(:ids)))
