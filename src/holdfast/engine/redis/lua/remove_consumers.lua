-- remove_consumers: remove consumers without pending entries. Removing others would lose their entries.
-- KEYS   1-4 streams  5 workers  6 control  then streams of further lanes
-- ARGV   1 group  2 consumer to remove ('': all that are idle)  3 idle ms  4 consumer never to remove
--        5 declared lanes
-- Reply  {'lanes', …} | how many
local streams = declared_streams()
local workers, control = KEYS[5], KEYS[6]
local group, worker, min_idle, retry_consumer = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local missing = undeclared_lanes(streams, numbers_in(redis.call('HGET', control, 'lanes')))
if missing then return missing end

local count = 0
if worker ~= '' then
  redis.call('ZREM', workers, worker)
else
  redis.call('ZREMRANGEBYSCORE', workers, '-inf', format_integer(now_ms() - min_idle))
end
for _, stream in pairs(streams) do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, group)
  if not consumers.err then
    for _, info in ipairs(consumers) do
      local name, pending, idle = info[2], info[4], info[6]
      local matches = (worker == '' and idle >= min_idle) or name == worker
      if matches and pending == 0 and name ~= retry_consumer then
        redis.call('XGROUP', 'DELCONSUMER', stream, group, name)
        count = count + 1
      end
    end
  end
end
return count
