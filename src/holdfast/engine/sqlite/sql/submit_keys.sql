-- submit_keys: which job came first under a key; an expired entry is replaced.
-- Takes  queue; rows of tenant, key, job id, expires_at
INSERT OR REPLACE INTO submission_keys (queue, tenant_id, key, job_id, expires_at)
SELECT ?, column1, column2, column3, column4
  FROM (VALUES {{rows 4}})
 WHERE column1 IS NOT NULL
