-- use_queue: the queue has had a job from now on.
-- Takes  :queue
INSERT INTO queues (queue, used) VALUES (:queue, 1)
ON CONFLICT (queue) DO UPDATE SET used = 1 WHERE used = 0
