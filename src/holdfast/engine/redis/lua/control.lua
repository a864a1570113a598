-- control: an operator's hand on a queue; everyone who listens or waits is told.
-- KEYS   1 control  2 notices  3 wake
-- ARGV   pairs: field, value ('' removes it)
-- Reply  'ok'
-- HDEL comes first: it is allowed on a full Redis, and then so is the rest.
for i = 1, #ARGV, 2 do redis.call('HDEL', KEYS[1], ARGV[i]) end
for i = 1, #ARGV, 2 do
  if ARGV[i + 1] ~= '' then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'controlled', '1')
redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'more', 1)
return 'ok'
