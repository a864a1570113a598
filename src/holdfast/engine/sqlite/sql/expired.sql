-- expired: finished jobs past their time that nobody still needs. Asked by a reader: it may have to look past many.
-- Takes  :queue, :before, :limit
-- Gives  a list of ids
SELECT json_group_array(id)
  FROM (
    SELECT id FROM jobs
     WHERE queue = :queue AND finished_at IS NOT NULL AND finished_at <= :before AND {{unneeded}}
     ORDER BY finished_at LIMIT :limit)
