-- read_to: how far the reader has come.
-- Takes  :queue, :position
UPDATE feed_readers SET position = max(position, :position) WHERE queue = :queue
