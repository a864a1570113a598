-- stats: a queue at one moment. Reads only.
-- KEYS   1-3 streams  4 feed  5 retry  6 waiting  7 suspended  8 held  9 dead  10 delayed  11 control  12 dlq
-- ARGV   1 group  2 consumer that holds retries in the pending list
-- Reply  {in line, pending, waiting in the pending list, retry, suspended, held, dead, delayed, feed entries, dead letters,
--         workers, controls, bytes of the feed (0 without a reader)}
local group, parking = ARGV[1], ARGV[2]
local in_line, pending, parked, names = 0, 0, 0, {}
for line = 1, 3 do
  in_line = in_line + redis.call('XLEN', KEYS[line])
  local summary = redis.pcall('XPENDING', KEYS[line], group)
  if not summary.err then
    pending = pending + summary[1]
    for _, consumer in ipairs(summary[4] or {}) do
      if consumer[1] == parking then parked = parked + tonumber(consumer[2]) end
    end
    for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[line], group)) do names[info[2]] = true end
  end
end
names[parking] = nil
local workers = 0
for _ in pairs(names) do workers = workers + 1 end
local bytes = redis.call('HEXISTS', KEYS[11], 'reader') == 1 and redis.call('MEMORY', 'USAGE', KEYS[4]) or 0
return { in_line, pending, parked, redis.call('ZCARD', KEYS[5]), redis.call('ZCARD', KEYS[7]), redis.call('ZCARD', KEYS[8]),
  redis.call('ZCARD', KEYS[9]), redis.call('ZCARD', KEYS[10]), redis.call('XLEN', KEYS[4]), redis.call('XLEN', KEYS[12]),
  workers, redis.call('HGETALL', KEYS[11]), bytes }
