-- same_feed: whether the feed still has an entry.
-- Takes  :queue, :position, :nonce
-- Gives  a list: the position, or nothing
SELECT json_group_array(position) FROM feed_entries
 WHERE queue = :queue AND position = :position AND nonce = :nonce
