-- control: an operator's hand on a queue.
-- Takes  :queue
-- Gives  [paused, intake paused, concurrency or null]
SELECT coalesce(
    (SELECT json_array(
                json(iif(paused, 'true', 'false')), json(iif(intake_paused, 'true', 'false')), concurrency)
       FROM queues WHERE queue = :queue),
    json_array(json('false'), json('false'), NULL))
