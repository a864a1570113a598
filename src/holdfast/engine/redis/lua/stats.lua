-- stats: a queue at one moment. Reads only.
-- KEYS   1-3 streams  4 feed  5 retry  6 waiting  7 suspended  8 held  9 dead  10 delayed  11 control  12 dlq  13 workers
-- ARGV   1 group  2 consumer that holds retries in the pending list  3 milliseconds without a claim after which a worker is gone
-- Reply  {in line, pending, waiting in the pending list, retry, suspended, held, dead, delayed, feed entries, dead letters,
--         workers, controls, bytes of the feed (0 without a reader)}
local group, parking = ARGV[1], ARGV[2]
local in_line, pending, parked = 0, 0, 0
for line = 1, 3 do
  in_line = in_line + redis.call('XLEN', KEYS[line])
  local summary = redis.pcall('XPENDING', KEYS[line], group)
  if not summary.err then
    pending = pending + summary[1]
    for _, consumer in ipairs(summary[4] or {}) do
      if consumer[1] == parking then parked = parked + tonumber(consumer[2]) end
    end
  end
end
local workers = redis.call('ZCOUNT', KEYS[13], '(' .. number(now_ms() - tonumber(ARGV[3])), '+inf')
local bytes = redis.call('HEXISTS', KEYS[11], 'reader') == 1 and redis.call('MEMORY', 'USAGE', KEYS[4]) or 0
return { in_line, pending, parked, redis.call('ZCARD', KEYS[5]), redis.call('ZCARD', KEYS[7]), redis.call('ZCARD', KEYS[8]),
  redis.call('ZCARD', KEYS[9]), redis.call('ZCARD', KEYS[10]), redis.call('XLEN', KEYS[4]), redis.call('XLEN', KEYS[12]),
  workers, redis.call('HGETALL', KEYS[11]), bytes }
