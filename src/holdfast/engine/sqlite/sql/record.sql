-- record: the dead letter is written.
-- Takes  :ids (a JSON list), :now
UPDATE jobs SET came_from = state, state = 'dlq_recorded', updated_at = :now
 WHERE id IN (SELECT value FROM json_each(:ids)) AND state IN ({{into dlq_recorded}})
