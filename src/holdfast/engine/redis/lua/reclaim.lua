-- reclaim: take over leases that are lost, if they still are.
-- KEYS   1-3 streams  4 feed  5 control  then n records
-- ARGV   1 group  2 worker  3 nonce  4 feed limit  5 visibility timeout  6 autoclaim (1: Redis 6.2 and later)  7 n
--        then 4 a lease: line, message id, owner, deliveries
-- Reply  {'paused'} | {'ok', now, then position (from 1), deliveries, entry, record ('' if none) for each taken}
local feed_key, control = KEYS[4], KEYS[5]
local group, worker, nonce, feed_limit = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local timeout, autoclaim, n = tonumber(ARGV[5]), ARGV[6] == '1', tonumber(ARGV[7])

local controls = redis.call('HMGET', control, 'paused', 'reader')
if controls[1] == '1' then return { 'paused' } end

local records = redis.call('MGET', unpack(KEYS, 6, 5 + n))
local now = number(now_ms())
local lost, gone = {}, {}
for i = 1, n do
  local arg = 7 + (i - 1) * 4
  local line, id, owner, deliveries = ARGV[arg + 1] + 1, ARGV[arg + 2], ARGV[arg + 3], tonumber(ARGV[arg + 4])
  local row = redis.call('XPENDING', KEYS[line], group, id, id, 1)[1]
  if row and row[2] == owner and row[3] >= timeout and row[4] == deliveries then
    if #redis.call('XRANGE', KEYS[line], id, id) == 0 then
      gone[#gone + 1] = { KEYS[line], id }
    else
      local _, _, _, body = header_of(records[i] or '')
      lost[#lost + 1] = { i, line, id, owner, body and body ~= '' and cmsgpack.unpack(body)[RETRIES] or '' }
    end
  end
end

-- An entry that someone deleted under the pending list would stay there for ever.
for _, entry in ipairs(gone) do redis.call('XACK', entry[1], group, entry[2]) end
local reply, moves = { 'ok', now }, {}
for _, row in ipairs(lost) do
  local i, line, id, owner, retries = unpack(row)
  local entry
  if autoclaim then
    entry = redis.call('XAUTOCLAIM', KEYS[line], group, worker, timeout, id, 'COUNT', 1)[2][1]
  else
    entry = redis.call('XCLAIM', KEYS[line], group, worker, timeout, id)[1]
  end
  local deliveries = redis.call('XPENDING', KEYS[line], group, id, id, 1, worker)[1][4]
  local r, fields = #reply, entry[2]
  reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4] = i, deliveries, entry, records[i] or ''
  -- Foreign messages have no header; `adopt` knows whether they are jobs yet, and tells their story.
  if is_ours(fields) then
    moves[#moves + 1] = { fields[4], fields[2], deliveries, owner, id, retries, tenant_of(fields) }
  end
end
feed(feed_key, feed_limit, controls[2], nonce, 'reclaimed', now, worker, moves)
return reply
