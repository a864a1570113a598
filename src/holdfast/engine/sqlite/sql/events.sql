-- events: what happened, one row a move, in order.
-- Takes  at; rows of the job's row, seq, type, from_state, to_state, attempt, retry_count, worker, message, data
INSERT INTO events (at, job, seq, type, from_state, to_state, attempt, retry_count, worker, message, data)
SELECT ?, column1, column2, column3, column4, column5, column6, column7, column8, column9, column10
  FROM (VALUES {{rows 10}})
 WHERE column1 IS NOT NULL
