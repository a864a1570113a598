-- unneeded: which of some finished jobs nobody still needs.
-- Takes  :queue, :before, :ids (a JSON list)
-- Gives  a list of ids
SELECT json_group_array(id) FROM jobs
 WHERE id IN (SELECT value FROM json_each(:ids)) AND finished_at IS NOT NULL AND finished_at <= :before
   AND queue = :queue AND {{unneeded}}
