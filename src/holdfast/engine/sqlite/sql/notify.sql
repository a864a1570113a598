-- notify: something that listeners in other processes want to know.
-- Takes  :queue, :kind, :job_id, :at
INSERT INTO notices (queue, kind, job_id, at_ms) VALUES (:queue, :kind, :job_id, :at)
