-- prune_feed: entries whose events are all gone.
-- Takes  :queue
DELETE FROM feed_entries
 WHERE queue = :queue AND NOT EXISTS (SELECT 1 FROM feed_readers WHERE queue = :queue)
   AND position < coalesce((SELECT min(id) FROM events), 0)
