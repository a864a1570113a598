-- control: an operator's hand on a queue.
-- Takes  :queue
-- Gives  [paused, intake paused, concurrency, intake limit, backlog alert, tenants' controls as JSON text; or nulls]
SELECT coalesce(
    (SELECT json_array(
                json(iif(paused, 'true', 'false')), json(iif(intake_paused, 'true', 'false')), concurrency,
                intake_limit, backlog_alert, tenants)
       FROM queues WHERE queue = :queue),
    json_array(json('false'), json('false'), NULL, NULL, NULL, NULL))
