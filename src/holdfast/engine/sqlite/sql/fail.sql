-- fail: the end of a job whose dead letter is written.
-- Takes  :ids (a JSON list), :now
UPDATE jobs SET came_from = state, state = 'failed', updated_at = :now, finished_at = :now
 WHERE id IN (SELECT value FROM json_each(:ids)) AND state IN ({{into failed}})
