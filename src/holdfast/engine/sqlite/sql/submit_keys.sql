-- submit_keys: which job came first under a key; an expired entry is replaced.
-- Takes  queue, expires_at; rows of tenant, key, job id
INSERT OR REPLACE INTO submission_keys (queue, expires_at, tenant_id, key, job_id)
SELECT ?, ?, column1, column2, column3
  FROM (VALUES {{rows 3}})
 WHERE column1 IS NOT NULL
