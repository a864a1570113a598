-- set_control: an operator changes a queue's controls.
-- Takes  :queue, :paused, :intake_paused, :concurrency
INSERT INTO queues (queue, paused, intake_paused, concurrency)
VALUES (:queue, :paused, :intake_paused, :concurrency)
ON CONFLICT (queue) DO UPDATE
   SET paused = excluded.paused, intake_paused = excluded.intake_paused, concurrency = excluded.concurrency
