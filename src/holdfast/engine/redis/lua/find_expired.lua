-- find_expired: leases that have been idle for the visibility timeout. Reads only; `reclaim` claims them.
-- KEYS   1-4 streams  5 control  then streams of further lanes
-- ARGV   1 group  2 visibility timeout  3 limit  4 filter by idle time (1: Redis 6.2 and later)
--        5 consumer that holds retries in the pending list  6 packed: stream index, start, … ('-' for other streams)
--        7 declared lanes
-- Reply  {'lanes', …} | {where to continue ({stream index, start, …}), number of pending messages, 1 within the
--        visibility timeout after an outage, then stream index, message id, owner, delivery count, job id for each}. No
--        job id: deleted, or a foreign message without one.
local streams = declared_streams()
local group, timeout, limit, filter, retry_consumer = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4] == '1', ARGV[5]
local controls = redis.call('HMGET', KEYS[5], 'lanes', 'outage', 'paused')
local missing = undeclared_lanes(streams, numbers_in(controls[1]))
if missing then return missing end

-- Only the job id: payloads may be large, and most leases may be read for a filter in vain.
local function job_id_of(fields)
  local job_id = ''
  for i = 1, #fields, 2 do
    if fields[i] == 'task_id' then job_id = fields[i + 1] end
  end
  return job_id
end

local starts, indexes, values = {}, {}, cmsgpack.unpack(ARGV[6])
for i = 1, #values, 2 do starts[values[i]] = values[i + 1] end
for index in pairs(streams) do indexes[#indexes + 1] = index - 1 end
table.sort(indexes)

-- Before 6.2 XPENDING cannot filter by idle time, nor exclude the start of a range: read more rows.
-- Rows of retries that wait in the pending list count towards the limit, too.
local scan = math.max(limit, 1000)
local continuations, found = {}, 0
local leased = 0
for lane = 0, math.floor(indexes[#indexes] / STREAMS_PER_LANE) do
  if streams[STREAMS_PER_LANE * lane + 1] then leased = leased + leases_in(streams, lane, group, '') end
end
local reply = { continuations, leased, is_recent(controls[2], timeout) and 1 or 0 }
local function continue_at(index, start) continuations[#continuations + 1], continuations[#continuations + 2] = index, start end

if controls[3] == '1' then return reply end -- `reclaim` would claim none

for _, index in ipairs(indexes) do
  local stream, start, rows, after = streams[index + 1], starts[index] or '-', {}, nil
  if found >= limit then
    after = start
  elseif filter then
    rows = pending(stream, group, 'IDLE', timeout, start, '+', scan)
    if #rows == scan then after = '(' .. rows[#rows][1] end
  else
    rows = pending(stream, group, start, '+', scan)
    if #rows == scan then after = rows[#rows][1] end
  end
  for _, row in ipairs(rows) do
    local id, owner, idle, deliveries = row[1], row[2], row[3], row[4]
    if idle >= timeout and owner ~= retry_consumer then
      if found >= limit then
        after = id
        break
      end
      found = found + 1
      local entry, r = redis.call('XRANGE', stream, id, id)[1], #reply
      reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4] = index, id, owner, deliveries
      reply[r + 5] = entry and job_id_of(entry[2]) or ''
    end
  end
  if after and after ~= '-' then continue_at(index, after) end
end
return reply
