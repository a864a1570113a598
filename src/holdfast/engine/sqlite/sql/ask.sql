-- ask: questions to people, in the embedded ledger (requirement A2). One that is there already stays as it is.
-- Takes  requested_at, queue; rows of tenant, approval id, job id, type, name, payload hash, policies, reason, details,
--        quorum, deadline, requested_by
INSERT OR IGNORE INTO approvals (
    requested_at, queue, tenant_id, approval_id, job_id, job_type, name, payload_hash, policies, reason, details, quorum,
    deadline, requested_by)
SELECT ?, ?, column1, column2, column3, column4, column5, column6, column7, column8, column9, column10, column11, column12
  FROM (VALUES {{rows 12}})
 WHERE column1 IS NOT NULL
