-- register_queue: a queue becomes known.
-- KEYS   1 set of queues
-- ARGV   1 queue
-- Reply  1 if it is new, else 0
-- SREM comes first: it is allowed on a full Redis, and then so is the rest.
redis.call('SREM', KEYS[1], '')
return redis.call('SADD', KEYS[1], ARGV[1])
