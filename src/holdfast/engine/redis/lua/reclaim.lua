-- reclaim: claim expired leases, if they are still expired. No limit of running jobs applies: they were leased before.
-- KEYS   1-4 streams  5 feed  6 control  7 wake  then n records, then streams of further lanes
-- ARGV   1 group  2 worker  3 nonce  4 feed limit  5 visibility timeout  6 autoclaim (1: Redis 6.2 and later)  7 n
--        then 4 per lease: stream index, message id, owner, delivery count, then declared lanes
-- Reply  {'paused'} | {'ok', now, then index (from 1), delivery count, entry, record ('' if none) for each claimed lease}
--        | {'outage', …the same}: an outage ended within the visibility timeout, so that these leases may have expired in it
local streams = declared_streams()
local feed_key, control, wake = KEYS[5], KEYS[6], KEYS[7]
local group, worker, nonce, feed_limit = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local timeout, autoclaim, n = tonumber(ARGV[5]), ARGV[6] == '1', tonumber(ARGV[7])
local FIRST_KEY, FIRST_ARG, STRIDE = 7, 7, 4

local controls = redis.call('HMGET', control, 'paused', 'reader', 'limits', 'marker', 'outage')
if controls[1] == '1' then return { 'paused' } end

local records = redis.call('MGET', unpack(KEYS, FIRST_KEY + 1, FIRST_KEY + n))
local now = format_integer(now_ms())
local lost, deleted, freed = {}, {}, {}
for i = 1, n do
  local arg = FIRST_ARG + (i - 1) * STRIDE
  local index, id, owner, deliveries = tonumber(ARGV[arg + 1]), ARGV[arg + 2], ARGV[arg + 3], tonumber(ARGV[arg + 4])
  local stream = streams[index + 1]
  local row = pending(stream, group, id, id, 1)[1]
  if row and row[2] == owner and row[3] >= timeout and row[4] == deliveries then
    if #redis.call('XRANGE', stream, id, id) == 0 then
      deleted[#deleted + 1], freed[index] = { stream, id }, true
    else
      lost[#lost + 1] = { i, index, id, owner, known_retries(records[i] or '') or '' }
    end
  end
end

-- The message was deleted, but its row would stay in the pending list for ever.
for _, entry in ipairs(deleted) do redis.call('XACK', entry[1], group, entry[2]) end
local reply, moves = { is_recent(controls[5], timeout) and 'outage' or 'ok', now }, {}
for _, row in ipairs(lost) do
  local i, index, id, owner, retries = unpack(row)
  local stream, entry = streams[index + 1], nil
  if autoclaim then
    entry = redis.call('XAUTOCLAIM', stream, group, worker, timeout, id, 'COUNT', 1)[2][1]
  else
    entry = redis.call('XCLAIM', stream, group, worker, timeout, id)[1]
  end
  local deliveries = redis.call('XPENDING', stream, group, id, id, 1, worker)[1][4]
  local r, fields = #reply, entry[2]
  reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4] = i, deliveries, entry, records[i] or ''
  -- Foreign messages have no header; `adopt` knows whether they are jobs, and writes their events.
  if is_native(fields, controls[4], records[i], POSITION_PREFIX[index] .. id) then
    moves[#moves + 1] = { fields[4], fields[2], deliveries, owner, id, retries, tenant_of(fields) }
  end
end
append_feed(feed_key, feed_limit, controls[2], nonce, 'reclaimed', now, worker, moves)
wake_if_limited(wake, controls[3], freed)
return reply
