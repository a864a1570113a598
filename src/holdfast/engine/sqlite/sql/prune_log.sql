-- prune_log: the operators' log, past its time.
-- Takes  :before, :limit
DELETE FROM operator_events
 WHERE (tenant_id, id) IN (
    WITH RECURSIVE tenants (tenant_id) AS (
        SELECT min(tenant_id) FROM operator_events
        UNION ALL
        SELECT (SELECT min(operator_events.tenant_id) FROM operator_events
                 WHERE operator_events.tenant_id > tenants.tenant_id)
          FROM tenants WHERE tenants.tenant_id IS NOT NULL)
    SELECT old.tenant_id, old.id
      FROM tenants CROSS JOIN operator_events AS old ON old.tenant_id = tenants.tenant_id
     WHERE old.at <= :before
     LIMIT :limit)
