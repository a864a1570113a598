-- audit: what an operator did, for the feed. In nobody's story: the row of its job is 0.
-- Takes  :type, :message, :data (JSON text), :now
INSERT INTO events (job, seq, type, attempt, retry_count, message, data, at)
SELECT 0, coalesce(max(seq), 0) + 1, :type, 0, 0, :message, :data, :now FROM events WHERE job = 0
