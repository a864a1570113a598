-- uses: lanes
-- remove_consumers: forget consumers that hold nothing. One that still has pending entries stays: removing it would lose them.
-- KEYS   1-4 streams  5 workers  6 control  then streams of further lanes
-- ARGV   1 group  2 the one to forget ('' all that were idle long enough)  3 how long is enough  4 consumer never to forget
--        5 the lanes that are declared
-- Reply  {'lanes', …} | how many
local streams = declared_streams()
local workers, control = KEYS[5], KEYS[6]
local group, worker, enough, retry_consumer = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local missing = undeclared_lanes(streams, numbers_in(redis.call('HGET', control, 'lanes')))
if missing then return missing end

local count = 0
if worker ~= '' then
  redis.call('ZREM', workers, worker)
else
  redis.call('ZREMRANGEBYSCORE', workers, '-inf', format_integer(now_ms() - enough))
end
for _, stream in pairs(streams) do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, group)
  if not consumers.err then
    for _, info in ipairs(consumers) do
      local name, pending, idle = info[2], info[4], info[6]
      local wanted = (worker == '' and idle >= enough) or name == worker
      if wanted and pending == 0 and name ~= retry_consumer then
        redis.call('XGROUP', 'DELCONSUMER', stream, group, name)
        count = count + 1
      end
    end
  end
end
return count
