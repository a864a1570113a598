-- fed: queues whose feed has an entry after a position.
-- Takes  :positions (a JSON list of [queue, position])
-- Gives  a list of queues
SELECT json_group_array(asked.value ->> 0)
  FROM json_each(:positions) AS asked
 WHERE EXISTS (
    SELECT 1 FROM feed_entries WHERE queue = asked.value ->> 0 AND position > CAST(asked.value ->> 1 AS INTEGER))
