-- workers: who claims from some queues, and how many leases each has. Whoever holds one is there, seen or not.
-- Takes  :queues (a JSON list)
-- Gives  rows of [worker, queue, seen_at, leases], by name
SELECT json_group_array(json_array(worker, queue, seen_at, leases))
  FROM (
    SELECT worker, queue, max(seen_at) AS seen_at, sum(leases) AS leases
      FROM (
        SELECT worker, workers.queue, seen_at, 0 AS leases
          FROM json_each(:queues) AS asked CROSS JOIN workers ON workers.queue = asked.value
        UNION ALL
        SELECT worker, jobs.queue, max(claimed_at), count(*)
          FROM json_each(:queues) AS asked CROSS JOIN jobs ON jobs.queue = asked.value
         WHERE lease_until IS NOT NULL AND state = 'running'
         GROUP BY jobs.queue, worker)
     GROUP BY worker, queue
     ORDER BY worker, queue)
