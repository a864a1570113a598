-- next_due: when waiting jobs are due next.
-- Takes  :queues, a JSON list
-- Gives  [the earliest instant or null]
SELECT json_array(min((
           SELECT due_at FROM jobs WHERE queue = asked.value AND due_at IS NOT NULL ORDER BY due_at LIMIT 1)))
  FROM json_each(:queues) AS asked
