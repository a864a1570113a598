-- succeed: lease holders report success.
-- Takes  finished_at, updated_at; rows of id, place, deliveries, worker, result, meta, token
UPDATE jobs
   SET came_from = state, state = 'succeeded', finished_at = ?, updated_at = ?, result = done.result, meta = done.meta, token = done.token,
       lease_until = NULL, worker = NULL, error_code = NULL, last_error = NULL, error_message = NULL,
       last_seq = last_seq + 1
  FROM (
    SELECT column1 AS id, column2 AS place, column3 AS deliveries, column4 AS worker, column5 AS result,
           column6 AS meta, column7 AS token
      FROM (VALUES {{rows 7}})) AS done
 WHERE jobs.id = done.id AND jobs.state = 'running' AND jobs.place = done.place
   AND jobs.deliveries = done.deliveries AND jobs.worker = done.worker
