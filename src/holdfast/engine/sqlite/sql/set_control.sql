-- set_control: an operator changes a queue's controls.
-- Takes  :queue, :paused, :intake_paused, :concurrency, :intake_limit, :backlog_alert, :tenants (JSON text)
INSERT INTO queues (queue, paused, intake_paused, concurrency, intake_limit, backlog_alert, tenants)
VALUES (:queue, :paused, :intake_paused, :concurrency, :intake_limit, :backlog_alert, :tenants)
ON CONFLICT (queue) DO UPDATE
   SET paused = excluded.paused, intake_paused = excluded.intake_paused, concurrency = excluded.concurrency,
       intake_limit = excluded.intake_limit, backlog_alert = excluded.backlog_alert, tenants = excluded.tenants
