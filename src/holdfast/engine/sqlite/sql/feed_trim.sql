-- feed_trim: while no reader has ever registered the feed keeps only its latest entries.
-- Takes  :queue, :limit
DELETE FROM feed_entries
 WHERE queue = :queue AND NOT EXISTS (SELECT 1 FROM feed_readers WHERE queue = :queue)
   AND position <= (
    SELECT position FROM feed_entries WHERE queue = :queue ORDER BY position DESC LIMIT 1 OFFSET :limit)
