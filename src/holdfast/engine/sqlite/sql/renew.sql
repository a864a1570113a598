-- renew: push deadlines out.
-- Takes  until; rows of id, place, deliveries, worker
UPDATE jobs SET lease_until = ?
  FROM (SELECT column1 AS id, column2 AS place, column3 AS deliveries, column4 AS worker FROM (VALUES {{rows 4}})) AS held
 WHERE jobs.id = held.id AND jobs.state = 'running' AND jobs.place = held.place AND jobs.deliveries = held.deliveries
   AND jobs.worker = held.worker
