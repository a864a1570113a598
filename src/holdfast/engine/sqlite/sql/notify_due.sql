-- notify_due: a job waits that is due earlier than all others, if that is so.
-- Takes  :queue, :at
INSERT INTO notices (queue, kind, at_ms)
SELECT :queue, 'due', :at
 WHERE NOT EXISTS (SELECT 1 FROM jobs WHERE queue = :queue AND due_at IS NOT NULL AND due_at < :at)
