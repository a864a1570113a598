-- attach_reader: the feed has a reader from now on, as far as this memory reaches: see submit.
-- KEYS   1 control  2 feed (only if keys were put back before)
-- ARGV   1 whose memory it is  2 nonce
-- Reply  'ok'
-- HDEL comes first: it is allowed on a full Redis, and then so is the rest.
redis.call('HDEL', KEYS[1], 'reader')
redis.call('HSET', KEYS[1], 'reader', ARGV[1])
-- The ledger's position comes to lie behind the keys that it gave: a replica which has that entry has them, too. In an
-- empty feed it cannot lie before them.
if KEYS[2] and redis.call('XLEN', KEYS[2]) > 0 then
  append_packed_feed(KEYS[2], 0, true, ARGV[2], 'operator', format_integer(now_ms()), '', cmsgpack.pack({}), {})
end
return 'ok'
