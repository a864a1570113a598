-- see_worker: a worker reads from a queue.
-- Takes  :worker, :queue, :now
INSERT INTO workers (worker, queue, seen_at) VALUES (:worker, :queue, :now)
ON CONFLICT (queue, worker) DO UPDATE SET seen_at = excluded.seen_at
