-- claim: lease what may run now. Writes nothing per job: the pending list is the lease.
-- KEYS   1-3 streams  4 feed  5 control  6 wake  7 workers
-- ARGV   1 group  2 worker  3 limit  4 nonce  5 feed limit  6 wake group  7-9 lines in reading order
-- Reply  {'paused'} | {'ok', now, line, entries, line, entries, …} | {'nogroup', …the same}
local feed_key, control, wake, workers = KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local group, worker, limit, nonce, feed_limit, wake_group = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6]

local controls = redis.call('HMGET', control, 'paused', 'reader')
if controls[1] == '1' then return { 'paused' } end

check_types({ feed_key, wake }, { workers }, {})
local now = number(now_ms())
local reply, moves, room = { 'ok', now }, {}, limit
for turn = 7, 9 do
  if room <= 0 then break end
  local line = tonumber(ARGV[turn])
  -- pcall: a group that is gone must not hide what the lines before it have given.
  local got = redis.pcall('XREADGROUP', 'GROUP', group, worker, 'COUNT', room, 'STREAMS', KEYS[line + 1], '>')
  if got and got.err then
    if not string.find(got.err, 'NOGROUP', 1, true) then return got end
    reply[1] = 'nogroup'
  elseif got then
    local entries = got[1][2]
    room = room - #entries
    reply[#reply + 1] = line
    reply[#reply + 1] = entries
    for _, entry in ipairs(entries) do
      local fields = entry[2]
      if is_ours(fields) then
        local m = #moves
        moves[m + 1], moves[m + 2], moves[m + 3] = fields[4], fields[2], #fields == 8 and '' or tenant_of(fields)
      end
    end
  end
end
feed(feed_key, feed_limit, controls[2], nonce, 'claimed', now, worker, moves)
redis.call('ZADD', workers, now, worker)

if reply[1] == 'ok' then
  if room > 0 then
    -- Came short: the lines are empty. Whoever waits from now on is woken by the next message.
    for line = 1, 3 do redis.call('XGROUP', 'SETID', KEYS[line], wake_group, '$') end
  else
    -- There may be more: wake one other worker.
    redis.call('XADD', wake, 'MAXLEN', 1, '*', 'more', 1)
  end
end
return reply
