-- withdraw: a job does not wait for people any more, so nobody has to decide. Where somebody has, that stays.
-- Takes  :tenant, :job_id, :queue, :actor, :reason, :now
UPDATE approvals
   SET status = 'withdrawn', decided_by = :actor, decided_at = :now, decision_reason = :reason, acked_at = :now
 WHERE tenant_id = :tenant AND job_id = :job_id AND queue = :queue AND status = 'requested'
