-- any_lost: is there anything to reclaim? Asked outside of a transaction. A paused queue's jobs stay where they are.
-- Takes  :queues (a JSON list), :now
-- Gives  a list of queues
SELECT json_group_array(asked.value)
  FROM json_each(:queues) AS asked
 WHERE NOT EXISTS (SELECT 1 FROM queues WHERE queue = asked.value AND paused)
   AND EXISTS (SELECT 1 FROM jobs WHERE queue = asked.value AND lease_until IS NOT NULL AND lease_until <= :now)
