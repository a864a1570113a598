-- remember_keys: keys that a ledger knew; what is known here stays, but a job's own key is not kept for longer than said.
-- Takes  queue; rows of tenant, key, job id, expires_at
INSERT INTO submission_keys (queue, tenant_id, key, job_id, expires_at)
SELECT ?, column1, column2, column3, column4
  FROM (VALUES {{rows 4}})
 WHERE column1 IS NOT NULL
    ON CONFLICT DO UPDATE SET expires_at = min(expires_at, excluded.expires_at) WHERE job_id = excluded.job_id
