-- workers: the workers of a queue and their leases. Reads only.
-- KEYS   1-4 streams  5 workers  6 control  then streams of further lanes
-- ARGV   1 group  2 consumer that holds retries in the pending list  3 declared lanes
-- Reply  {'lanes', …} | {worker, time of its last claim or renewal, leases, …}
local streams = declared_streams()
local group, retry_consumer = ARGV[1], ARGV[2]
local missing = undeclared_lanes(streams, numbers_in(redis.call('HGET', KEYS[6], 'lanes')))
if missing then return missing end

local now, last_seen, leases = now_ms(), {}, {}
local rows = redis.call('ZRANGE', KEYS[5], 0, -1, 'WITHSCORES')
for i = 1, #rows, 2 do last_seen[rows[i]] = tonumber(rows[i + 1]) end
for _, stream in pairs(streams) do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, group)
  for _, info in ipairs(consumers.err and {} or consumers) do
    local name, pending_count, idle = info[2], info[4], info[6]
    -- A worker that renews a lease is alive, however long ago its last claim was.
    if name ~= retry_consumer and (pending_count > 0 or last_seen[name]) then
      last_seen[name] = math.max(last_seen[name] or 0, now - idle)
      leases[name] = (leases[name] or 0) + pending_count
    end
  end
end
local reply = {}
for name, at in pairs(last_seen) do
  local r = #reply
  reply[r + 1], reply[r + 2], reply[r + 3] = name, format_integer(at), leases[name] or 0
end
return reply
