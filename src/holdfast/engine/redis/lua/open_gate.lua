-- open_gate: let the jobs of a queue be claimed and moved in this epoch.
-- KEYS   1 control  2 feed  3 wake
-- ARGV   1 epoch of the verification  2 nonce  3 feed limit  4 verified (1|0)  5 jobs were corrected (1|0)
-- Reply  'other' (the engine has another epoch) | 'ok'
local control, feed_key = KEYS[1], KEYS[2]
if ARGV[1] ~= EPOCH then return 'other' end
check_types({ feed_key, KEYS[3] }, {}, {})
local at = now_ms()
-- HDEL comes first: a full Redis allows it, and then the rest of the script.
redis.call('HDEL', control, 'cleared')
if ARGV[4] == '1' then
  redis.call('HDEL', control, 'unverified')
else
  redis.call('HSETNX', control, 'unverified', format_integer(at))
end
redis.call('HSET', control, 'cleared', EPOCH)
-- A reader behind this entry has read an engine with the corrections: one that goes back to before them does not have it.
if ARGV[5] == '1' then
  append_packed_feed(feed_key, ARGV[3], redis.call('HGET', control, 'reader'), ARGV[2], 'operator', format_integer(at), '', cmsgpack.pack({}), {})
end
wake_one(KEYS[3])
return 'ok'
