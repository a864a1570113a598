-- reclaim: take over leases that have been idle for the visibility timeout.
-- KEYS   1-3 streams  4 feed  5 control
-- ARGV   1 group  2 worker  3 nonce  4 feed limit  5 visibility timeout  6 limit  7 autoclaim (1: Redis 6.2 and later)
--        8 consumer that holds retries in the pending list  9-11 where to go on in each line
-- Reply  {'paused'} | {'ok', now, next start of each line (3), then line, old owner, deliveries, entry for each taken}
local feed_key, control = KEYS[4], KEYS[5]
local group, worker, nonce, feed_limit = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local timeout, limit, autoclaim, parking = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7] == '1', ARGV[8]

local controls = redis.call('HMGET', control, 'paused', 'reader')
if controls[1] == '1' then return { 'paused' } end

-- Read: who lost what. XPENDING names the old owner, which a claim alone never does.
-- Before 6.2 XPENDING cannot filter by idle time, nor exclude the start of a range: look at more rows.
local scan = autoclaim and limit or 1000
local now = number(now_ms())
local reply, lost, gone = { 'ok', now, '-', '-', '-' }, {}, {}
for line = 1, 3 do
  local stream, start = KEYS[line], ARGV[8 + line]
  local rows
  if #lost >= limit then
    rows, reply[2 + line] = {}, start
  elseif autoclaim then
    rows = redis.call('XPENDING', stream, group, 'IDLE', timeout, start, '+', scan)
    if #rows == scan then reply[2 + line] = '(' .. rows[#rows][1] end
  else
    rows = redis.call('XPENDING', stream, group, start, '+', scan)
    if #rows == scan then reply[2 + line] = rows[#rows][1] end
  end
  for _, row in ipairs(rows) do
    local id, owner, idle = row[1], row[2], row[3]
    if idle >= timeout and owner ~= parking then
      if #lost >= limit then
        reply[2 + line] = id
        break
      end
      if #redis.call('XRANGE', stream, id, id) == 0 then
        gone[#gone + 1] = { stream, id }
      else
        lost[#lost + 1] = { line, id, owner }
      end
    end
  end
end

-- Write. An entry that someone deleted under the pending list would stay there for ever.
for _, entry in ipairs(gone) do redis.call('XACK', entry[1], group, entry[2]) end
local moves = {}
for _, row in ipairs(lost) do
  local line, id, owner = row[1], row[2], row[3]
  local entry
  if autoclaim then
    entry = redis.call('XAUTOCLAIM', KEYS[line], group, worker, timeout, id, 'COUNT', 1)[2][1]
  else
    entry = redis.call('XCLAIM', KEYS[line], group, worker, timeout, id)[1]
  end
  local deliveries = redis.call('XPENDING', KEYS[line], group, id, id, 1, worker)[1][4]
  local r, fields = #reply, entry[2]
  reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4] = line - 1, owner, deliveries, entry
  -- Foreign messages have no header; `adopt` knows whether they are jobs yet, and tells their story.
  if fields[1] == 'holdfast' then moves[#moves + 1] = { fields[4], fields[2], deliveries, owner, id } end
end
feed(feed_key, feed_limit, controls[2], nonce, 'reclaimed', now, worker, moves)
return reply
