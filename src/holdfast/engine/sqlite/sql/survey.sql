-- survey: which of some jobs are not known here, and where the feed ends, at one moment.
-- Takes  :queue, :ids (a JSON list of job ids)
-- Gives  [ids, position or null, nonce or null]
SELECT json_array(
    (SELECT json_group_array(asked.value) FROM json_each(:ids) AS asked
      WHERE NOT EXISTS (SELECT 1 FROM jobs WHERE queue = :queue AND job_id = asked.value)),
    (SELECT position FROM feed_entries WHERE queue = :queue ORDER BY position DESC LIMIT 1),
    (SELECT nonce FROM feed_entries WHERE queue = :queue ORDER BY position DESC LIMIT 1))
