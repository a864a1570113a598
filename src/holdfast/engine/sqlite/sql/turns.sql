-- turns: whose turn it is from now on.
-- Takes  :queue, :turns (JSON text)
INSERT INTO queues (queue, turns) VALUES (:queue, :turns)
ON CONFLICT (queue) DO UPDATE SET turns = excluded.turns
