-- stats: a queue at one moment, counted in the partial indexes alone.
-- Takes  :queue, :now
-- Gives  [states: [[state, count]…], delayed, workers, feed entries, dead letters, unread bytes of the feed (0 without a
--        reader), leases and retries in the pending list, jobs in line or running by tenant: [[tenant, count]…]]
SELECT json_array(
    (SELECT json_group_array(json_array(state, count)) FROM (
        SELECT state, count(*) AS count FROM jobs WHERE queue = :queue AND line IS NOT NULL GROUP BY state
        UNION ALL
        SELECT state, count(*) FROM jobs WHERE queue = :queue AND due_at IS NOT NULL GROUP BY state
        UNION ALL
        SELECT state, count(*) FROM jobs WHERE queue = :queue AND lease_until IS NOT NULL GROUP BY state
        UNION ALL
        SELECT state, count(*) FROM jobs WHERE queue = :queue AND state IN ({{aside}}) GROUP BY state)),
    (SELECT count(*) FROM jobs WHERE queue = :queue AND due_at > :now AND state = 'queued'),
    (SELECT count(*) FROM workers WHERE queue = :queue),
    (SELECT count(*) FROM feed_entries WHERE queue = :queue),
    (SELECT count(*) FROM dlq_items WHERE queue = :queue),
    coalesce((SELECT sum(bytes) FROM feed_entries, feed_readers
               WHERE feed_entries.queue = :queue AND feed_readers.queue = :queue
                 AND feed_entries.position > feed_readers.position), 0),
    (SELECT count(*) FROM jobs WHERE queue = :queue AND lease_until IS NOT NULL),
    (SELECT json_group_array(json_array(tenant_id, count)) FROM (
        SELECT tenant_id, sum(count) AS count FROM (
            SELECT tenant_id, count(*) AS count FROM jobs WHERE queue = :queue AND line IS NOT NULL
             GROUP BY priority, tenant_id
            UNION ALL
            SELECT tenant_id, count(*) FROM jobs
             WHERE queue = :queue AND lease_until IS NOT NULL AND state = 'running' GROUP BY tenant_id)
         GROUP BY tenant_id))
)
