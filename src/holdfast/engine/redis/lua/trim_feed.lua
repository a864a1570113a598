-- trim_feed: drop entries before the reader's position, keeping a tail for event streams.
-- KEYS   1 feed  2 control
-- ARGV   1 position  2 entries to keep before it  3 trim by id (1: Redis 6.2 and later)
-- Reply  number of entries left up to the position
local feed_key, position, tail = KEYS[1], ARGV[1], tonumber(ARGV[2])
local kept = redis.call('XREVRANGE', feed_key, position, '-', 'COUNT', tail + 1)
local first = kept[#kept] and kept[#kept][1] or position
if ARGV[3] == '1' then
  redis.call('XTRIM', feed_key, 'MINID', first)
else
  local old
  repeat
    old = {}
    for _, entry in ipairs(redis.call('XRANGE', feed_key, '-', first, 'COUNT', CHUNK)) do
      if entry[1] ~= first then old[#old + 1] = entry[1] end
    end
    if #old > 0 then redis.call('XDEL', feed_key, unpack(old)) end
  until #old == 0
end
local count = redis.call('XLEN', feed_key)
if tail > 0 and count > 0 then
  -- Entries that were read do not count towards the limit; their bytes are estimated from their number.
  local bytes = (redis.call('MEMORY', 'USAGE', feed_key) or 0) * math.min(1, #kept / count)
  redis.call('HSET', KEYS[2], 'feed_read', format_integer(math.floor(bytes)))
end
return #kept
