-- notices: what happened in a queue since a listener last asked.
-- Takes  :queue, :after
-- Gives  a list of [id, kind, job id, at_ms]
SELECT json_group_array(json_array(id, kind, job_id, at_ms))
  FROM (SELECT * FROM notices WHERE id > :after AND queue = :queue ORDER BY id)
