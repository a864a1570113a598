-- prune_executions: what became of messages, past its time.
-- Takes  :before, :limit
DELETE FROM queue_executions
 WHERE (tenant_id, id) IN (
    WITH RECURSIVE tenants (tenant_id) AS (
        SELECT min(tenant_id) FROM queue_executions
        UNION ALL
        SELECT (SELECT min(queue_executions.tenant_id) FROM queue_executions
                 WHERE queue_executions.tenant_id > tenants.tenant_id)
          FROM tenants WHERE tenants.tenant_id IS NOT NULL)
    SELECT old.tenant_id, old.id
      FROM tenants CROSS JOIN queue_executions AS old ON old.tenant_id = tenants.tenant_id
     WHERE old.started_at <= :before
     LIMIT :limit)
