-- log: what an operator did, for the embedded ledger.
-- Takes  :tenant, :id, :type, :actor, :target, :target_id, :queue, :reason, :before, :after (JSON text), :now
INSERT INTO operator_events (tenant_id, id, type, actor, target, target_id, queue, reason, before, after, at)
VALUES (:tenant, :id, :type, :actor, :target, :target_id, :queue, :reason, :before, :after, :now)
