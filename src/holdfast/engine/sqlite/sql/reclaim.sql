-- reclaim: another worker takes over leases that have run out.
-- Takes  :ids (a JSON list), :worker, :now, :until
UPDATE jobs
   SET attempt = attempt + 1, deliveries = deliveries + 1, worker = :worker, claimed_at = :now, lease_until = :until,
       last_seq = last_seq + 1, updated_at = :now
 WHERE id IN (SELECT value FROM json_each(:ids)) AND state = 'running' AND lease_until <= :now
