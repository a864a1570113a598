-- prune_outbox: events that were sent long ago. Those that wait or are dead stay.
-- Takes  :before, :limit
DELETE FROM outbox_events
 WHERE position IN (
    SELECT position FROM outbox_events WHERE status = 'SENT' AND sent_at <= :before ORDER BY sent_at LIMIT :limit)
