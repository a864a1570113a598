-- attach_reader: attach a reader to the feed for this epoch: see submit. An empty queue needs no verification: nothing in it is
-- from the past.
-- KEYS   1-4 streams  5 control  6 feed  7 wake
-- ARGV   1 epoch  2 nonce  3 keys were restored before (1|0)
-- Reply  'ok'
local control, feed_key, wake = KEYS[5], KEYS[6], KEYS[7]
check_types({ KEYS[1], KEYS[2], KEYS[3], KEYS[4], feed_key, wake }, {}, {})
local before = redis.call('HMGET', control, 'cleared', 'reader')
local entries = call('XLEN', feed_key)
for index = 1, STREAMS_PER_LANE do entries = entries + call('XLEN', KEYS[index]) end
local is_new = not before[1] and not before[2] and entries == 0
-- HDEL comes first: a full Redis allows it, and then the rest of the script.
redis.call('HDEL', control, 'reader')
redis.call('HSET', control, 'reader', ARGV[1])
if is_new then
  redis.call('HSET', control, 'cleared', ARGV[1])
  wake_one(wake)
end
-- The ledger's next position is after the keys that it restored: a replica that has this entry has the keys, too. In an
-- empty feed no position is before them.
if ARGV[3] == '1' and redis.call('XLEN', feed_key) > 0 then
  append_packed_feed(feed_key, 0, true, ARGV[2], 'operator', format_integer(now_ms()), '', cmsgpack.pack({}), {})
end
return 'ok'
