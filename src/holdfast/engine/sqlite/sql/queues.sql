-- queues: the queues that ever had a job, sorted.
-- Gives  a list of names
SELECT json_group_array(queue) FROM (SELECT queue FROM queues WHERE used ORDER BY queue)
