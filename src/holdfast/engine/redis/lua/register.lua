-- register: the feed has a reader from now on.
-- KEYS   1 control
-- Reply  'ok'
-- HDEL comes first: it is allowed on a full Redis, and then so is the rest.
redis.call('HDEL', KEYS[1], 'reader')
redis.call('HSET', KEYS[1], 'reader', '1')
return 'ok'
