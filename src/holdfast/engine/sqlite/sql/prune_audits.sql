-- prune_audits: operators' entries of the feed past their time that no reader still needs.
-- Takes  :queue, :before, :limit
DELETE FROM events
 WHERE id IN (
    SELECT id FROM events
     WHERE job = 0 AND at <= :before AND data ->> 'queue' = :queue
       AND (NOT EXISTS (SELECT 1 FROM feed_readers WHERE queue = :queue)
            OR id < coalesce((SELECT min(first_event) FROM feed_entries WHERE queue = :queue), 9223372036854775807))
     ORDER BY seq LIMIT :limit)
