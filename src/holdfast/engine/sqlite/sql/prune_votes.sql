-- prune_votes: what people said about pruned jobs goes with them. Before the approvals do.
-- Takes  :ids (a JSON list of the jobs' rows)
DELETE FROM approval_votes
 WHERE (tenant_id, approval_id) IN (
    SELECT approvals.tenant_id, approvals.approval_id
      FROM json_each(:ids) AS asked CROSS JOIN jobs ON jobs.id = asked.value
      CROSS JOIN approvals
        ON approvals.tenant_id = jobs.tenant_id AND approvals.job_id = jobs.job_id AND approvals.queue = jobs.queue)
