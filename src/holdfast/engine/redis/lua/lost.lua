-- lost: which leases have been idle for the visibility timeout? Reads only; `reclaim` takes them over.
-- KEYS   1-3 streams
-- ARGV   1 group  2 visibility timeout  3 limit  4 filter by idle time (1: Redis 6.2 and later)
--        5 consumer that holds retries in the pending list  6-8 where to go on in each line
-- Reply  {next start of each line (3), then line, message id, owner, deliveries, fields for each}; no fields: deleted
local group, timeout, limit, filter, parking = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4] == '1', ARGV[5]

-- Before 6.2 XPENDING cannot filter by idle time, nor exclude the start of a range: look at more rows.
-- Rows of retries that only wait count as looked at, too.
local scan = math.max(limit, 1000)
local reply, found = { '-', '-', '-' }, 0
for line = 1, 3 do
  local stream, start = KEYS[line], ARGV[5 + line]
  local rows
  if found >= limit then
    rows, reply[line] = {}, start
  elseif filter then
    rows = redis.call('XPENDING', stream, group, 'IDLE', timeout, start, '+', scan)
    if #rows == scan then reply[line] = '(' .. rows[#rows][1] end
  else
    rows = redis.call('XPENDING', stream, group, start, '+', scan)
    if #rows == scan then reply[line] = rows[#rows][1] end
  end
  for _, row in ipairs(rows) do
    local id, owner, idle, deliveries = row[1], row[2], row[3], row[4]
    if idle >= timeout and owner ~= parking then
      if found >= limit then
        reply[line] = id
        break
      end
      found = found + 1
      local entry, r = redis.call('XRANGE', stream, id, id)[1], #reply
      reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4] = line - 1, id, owner, deliveries
      reply[r + 5] = entry and entry[2] or {}
    end
  end
end
return reply
