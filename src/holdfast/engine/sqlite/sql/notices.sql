-- notices: what happened in some queues since a listener last asked.
-- Takes  :queues (a JSON list), :after
-- Gives  a list of [id, queue, kind, job id, at_ms]
SELECT json_group_array(json_array(id, queue, kind, job_id, at_ms))
  FROM (SELECT * FROM notices WHERE id > :after AND queue IN (SELECT value FROM json_each(:queues)) ORDER BY id)
