-- move: jobs go from one state to another, each only if it is still as it was when the move was decided.
-- Takes  updated_at; rows of id, from_state, place, deliveries, to_state, attempt, meta, error_code, last_error,
--        error_message, line, due_at, lease_until, next_retry_at, dlq_id, finished_at, token, last_seq
UPDATE jobs
   SET updated_at = ?, came_from = state, state = move.to_state, attempt = move.attempt, meta = move.meta,
       -- Its way to the end of a dead letter changes nothing about why it died.
       error_code = iif(move.from_state LIKE 'dlq%', jobs.error_code, move.error_code),
       last_error = iif(move.from_state LIKE 'dlq%', jobs.last_error, move.last_error),
       error_message = iif(move.from_state LIKE 'dlq%', jobs.error_message, move.error_message), line = move.line, due_at = move.due_at,
       lease_until = move.lease_until, next_retry_at = move.next_retry_at, dlq_id = coalesce(move.dlq_id, jobs.dlq_id),
       finished_at = move.finished_at,
       -- A job that sleeps keeps its time, also while it is parked.
       run_at = iif(move.to_state = 'queued', coalesce(move.due_at, jobs.run_at), jobs.run_at), token = coalesce(move.token, jobs.token), last_seq = move.last_seq, worker = NULL
  FROM (
    SELECT column1 AS id, column2 AS from_state, column3 AS place, column4 AS deliveries, column5 AS to_state,
           column6 AS attempt, column7 AS meta, column8 AS error_code, column9 AS last_error,
           column10 AS error_message, column11 AS line, column12 AS due_at, column13 AS lease_until,
           column14 AS next_retry_at, column15 AS dlq_id, column16 AS finished_at, column17 AS token,
           column18 AS last_seq
      FROM (VALUES {{rows 18}})) AS move
 WHERE jobs.id = move.id AND jobs.state = move.from_state AND jobs.place = move.place
   AND jobs.deliveries = move.deliveries
