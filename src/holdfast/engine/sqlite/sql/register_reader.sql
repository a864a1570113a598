-- register_reader: from now on nothing unread is dropped.
-- Takes  :queue, :now
INSERT OR IGNORE INTO feed_readers (queue, registered_at) VALUES (:queue, :now)
