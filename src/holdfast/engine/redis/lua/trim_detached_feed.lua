-- trim_detached_feed: drop feed entries that are as old as the oldest finished record, if no reader is attached.
-- KEYS   1 control  2 feed
-- ARGV   1 first id to keep  2 trim by id (1: Redis 6.2 and later)
-- Reply  number of entries dropped
if redis.call('HEXISTS', KEYS[1], 'reader') == 1 then return 0 end
if ARGV[2] == '1' then return redis.call('XTRIM', KEYS[2], 'MINID', ARGV[1]) end
local old = {}
for _, entry in ipairs(redis.call('XRANGE', KEYS[2], '-', ARGV[1], 'COUNT', CHUNK)) do old[#old + 1] = entry[1] end
return #old > 0 and redis.call('XDEL', KEYS[2], unpack(old)) or 0
