-- prune_effects: keys of effects that are done and may be used again. Reserved ones and those in doubt stay.
-- Takes  :now, :limit
DELETE FROM idempotency_keys
 WHERE (tenant_id, key) IN (
    WITH RECURSIVE tenants (tenant_id) AS (
        SELECT min(tenant_id) FROM idempotency_keys WHERE expires_at IS NOT NULL
        UNION ALL
        SELECT (SELECT min(idempotency_keys.tenant_id) FROM idempotency_keys
                 WHERE expires_at IS NOT NULL AND idempotency_keys.tenant_id > tenants.tenant_id)
          FROM tenants WHERE tenants.tenant_id IS NOT NULL)
    SELECT old.tenant_id, old.key
      FROM tenants CROSS JOIN idempotency_keys AS old ON old.tenant_id = tenants.tenant_id
     WHERE old.expires_at IS NOT NULL AND old.expires_at <= :now AND old.state = 'done'
     LIMIT :limit)
