-- register_queue: add a queue to the set of queues.
-- KEYS   1 set of queues
-- ARGV   1 queue
-- Reply  1 if it is new, else 0
-- SREM comes first: a full Redis allows it, and then the rest of the script.
redis.call('SREM', KEYS[1], '')
return redis.call('SADD', KEYS[1], ARGV[1])
