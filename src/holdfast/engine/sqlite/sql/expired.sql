-- expired: finished jobs past their time that no reader of the feed still needs.
-- Takes  :queue, :before, :limit
-- Gives  a list of ids
SELECT json_group_array(id)
  FROM (
    SELECT id FROM jobs
     WHERE queue = :queue AND finished_at IS NOT NULL AND finished_at <= :before
       AND (NOT EXISTS (SELECT 1 FROM feed_readers WHERE queue = :queue)
            OR coalesce((SELECT max(job_events.id) FROM job_events WHERE job = jobs.id), 0)
             < coalesce((SELECT min(first_event) FROM feed_entries WHERE queue = :queue), 9223372036854775807))
     ORDER BY finished_at LIMIT :limit)
