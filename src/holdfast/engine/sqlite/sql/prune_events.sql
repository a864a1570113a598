-- prune_events: the story of pruned jobs goes with them.
-- Takes  :ids (a JSON list of the jobs' rows)
DELETE FROM events WHERE job IN (SELECT value FROM json_each(:ids))
