-- forget: the reader has everything before a position; the entry at it is kept, to prove identity.
-- Takes  :queue, :position
DELETE FROM feed_entries WHERE queue = :queue AND position < :position
