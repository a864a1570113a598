-- forget: the reader has everything before a position; the entry at it is kept, to prove identity, and a tail before it.
-- Takes  :queue, :position, :tail
DELETE FROM feed_entries
 WHERE queue = :queue AND position < :position
   AND position NOT IN (
    SELECT position FROM feed_entries WHERE queue = :queue AND position < :position ORDER BY position DESC LIMIT :tail)
