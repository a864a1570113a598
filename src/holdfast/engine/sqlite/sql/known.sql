-- known: what must be known before jobs are taken into a queue.
-- Takes  :queue, :now, :window (ms); :names, a JSON list of job ids and idempotency keys alike;
--        :tenants, a JSON list
-- Gives  [[intake paused, intake limit or null, tenants' controls as JSON text or null] or null, whether the feed has a
--        reader, its unread bytes or null, jobs, keys]
--        jobs: [job id, tenant, has no key of its own, ended and past the window]; keys: [tenant, key, job id, expired]
SELECT json_array(
    json((SELECT json_array(intake_paused, intake_limit, tenants) FROM queues WHERE queue = :queue)),
    EXISTS (SELECT 1 FROM feed_readers WHERE queue = :queue),
    (SELECT (SELECT total_bytes FROM feed_entries WHERE queue = :queue ORDER BY position DESC LIMIT 1)
          - coalesce(
                (SELECT total_bytes FROM feed_entries AS read
                  WHERE read.queue = :queue AND read.position <= feed_readers.position
                  ORDER BY read.position DESC LIMIT 1),
                (SELECT total_bytes - bytes FROM feed_entries WHERE queue = :queue ORDER BY position LIMIT 1))
       FROM feed_readers WHERE queue = :queue),
    (SELECT json_group_array(json_array(
                job_id, tenant_id, json(iif(idempotency_key = '', 'true', 'false')),
                json(iif(finished_at IS NOT NULL AND created_at + :window <= :now, 'true', 'false'))))
       FROM jobs
      WHERE queue = :queue AND job_id IN (SELECT value FROM json_each(:names))),
    (SELECT json_group_array(json_array(
                tenant_id, key, job_id,
                json(iif(expires_at <= :now AND NOT EXISTS (
                    SELECT 1 FROM jobs
                     WHERE jobs.queue = submission_keys.queue AND jobs.job_id = submission_keys.job_id
                       AND finished_at IS NULL), 'true', 'false'))))
       FROM submission_keys
      WHERE tenant_id IN (SELECT value FROM json_each(:tenants)) AND queue = :queue
        AND key IN (SELECT value FROM json_each(:names)))
)
