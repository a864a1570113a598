-- ready: is there anything to claim? Asked outside of a transaction, so that idle workers write nothing.
-- Takes  :queues, a JSON list
-- Gives  for each that is not paused: [queue, has jobs in line, of several tenants in one priority, controls of single
--        tenants as JSON text or null, when its next waiting job is due or null]
SELECT json_group_array(json_array(
           asked.value,
           json(iif(EXISTS (SELECT 1 FROM jobs WHERE queue = asked.value AND line IS NOT NULL), 'true', 'false')),
           json(iif(EXISTS (
               SELECT 1 FROM (VALUES {{each priority}}) AS lines
                WHERE (SELECT tenant_id FROM jobs
                        WHERE queue = asked.value AND priority = lines.column1 AND line IS NOT NULL
                        ORDER BY tenant_id LIMIT 1)
                   <> (SELECT tenant_id FROM jobs
                        WHERE queue = asked.value AND priority = lines.column1 AND line IS NOT NULL
                        ORDER BY tenant_id DESC LIMIT 1)), 'true', 'false')),
           (SELECT tenants FROM queues WHERE queue = asked.value),
           (SELECT due_at FROM jobs WHERE queue = asked.value AND due_at IS NOT NULL ORDER BY due_at LIMIT 1)))
  FROM json_each(:queues) AS asked
 WHERE NOT EXISTS (SELECT 1 FROM queues WHERE queue = asked.value AND paused)
