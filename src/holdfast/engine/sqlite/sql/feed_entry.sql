-- feed_entry: one atomic step of one queue for the ledger's reader.
-- Takes  :queue, :first, :last (event ids), :nonce, :bytes, :hurry
INSERT INTO feed_entries (queue, position, first_event, nonce, hurry, bytes, total_bytes)
SELECT :queue, :last, :first, :nonce, :hurry, :bytes, :bytes + coalesce((
    SELECT total_bytes FROM feed_entries WHERE queue = :queue ORDER BY position DESC LIMIT 1), 0)
