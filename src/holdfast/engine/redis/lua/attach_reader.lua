-- attach_reader: attach a reader to the feed for this epoch: see submit.
-- KEYS   1 control  2 feed (only if keys were restored before)
-- ARGV   1 epoch  2 nonce
-- Reply  'ok'
-- HDEL comes first: a full Redis allows it, and then the rest of the script.
redis.call('HDEL', KEYS[1], 'reader')
redis.call('HSET', KEYS[1], 'reader', ARGV[1])
-- The ledger's next position is after the keys that it restored: a replica that has this entry has the keys, too. In an
-- empty feed no position is before them.
if KEYS[2] and redis.call('XLEN', KEYS[2]) > 0 then
  append_packed_feed(KEYS[2], 0, true, ARGV[2], 'operator', format_integer(now_ms()), '', cmsgpack.pack({}), {})
end
return 'ok'
