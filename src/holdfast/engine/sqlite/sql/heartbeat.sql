-- heartbeat: the job has one event more.
-- Takes  :ids (a JSON list), :now
UPDATE jobs SET last_seq = last_seq + 1, updated_at = :now
 WHERE id IN (SELECT value FROM json_each(:ids)) AND state = 'running'
