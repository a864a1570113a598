-- restore: lost jobs come back in their state, while the feed is still the one that was surveyed.
-- KEYS   1-3 streams  4 feed  5 retry  6 suspended  7 held  8 dead  9 delayed  10 control  11 notices
--        then n records, then idempotency keys
-- ARGV   1 nonce  2 feed limit  3 position of the cut ('': the feed was empty)  4 its nonce  5 n
--        6 packed, 6 values a job: job id, state, due (0: at once), index of its idempotency key (0: none), attempt, tenant
--        then n bodies
-- Reply  {'forked'} | {'ok', feed id ('' if nothing was restored), positions (from 1) of those that were}
local streams = { KEYS[1], KEYS[2], KEYS[3] }
local feed_key, retry, delayed, control, notices = KEYS[4], KEYS[5], KEYS[9], KEYS[10], KEYS[11]
local parked = { suspended = KEYS[6], waiting_approval = KEYS[7], dlq_pending = KEYS[8], dlq_recorded = KEYS[8] }
local nonce, feed_limit, position, n = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[5])
local FIRST_KEY, FIRST_BODY, STRIDE = 11, 6, 6

if position == '' then
  if redis.call('XLEN', feed_key) > 0 then return { 'forked' } end
else
  local entry = redis.call('XRANGE', feed_key, position, position)[1]
  if not entry or nonce_of(entry[2]) ~= ARGV[4] then return { 'forked' } end
end
check_types({ notices, streams[1], streams[2], streams[3] }, { retry, KEYS[6], KEYS[7], KEYS[8], delayed }, {})
local jobs = cmsgpack.unpack(ARGV[6])
local known = redis.call('MGET', unpack(KEYS, FIRST_KEY + 1, #KEYS))
local reader = redis.call('HGET', control, 'reader')
local lost, taken = {}, {}
for i = 1, n do
  local first = (i - 1) * STRIDE
  if not known[i] and not taken[jobs[first + 1]] then
    taken[jobs[first + 1]] = true
    -- Unpacked here: it can fail, and nothing may once writing has begun.
    lost[#lost + 1] = { i, cmsgpack.unpack(ARGV[FIRST_BODY + i]), unpack(jobs, first + 1, first + STRIDE) }
  end
end

local at = now_ms()
local now = number(at)
local reply, moves, earliest = { 'ok', '' }, {}, {}
local function due_at(set, job_id, due)
  redis.call('ZADD', set, number(due), job_id)
  if not earliest[set] or due < earliest[set] then earliest[set] = due end
end

for _, job in ipairs(lost) do
  local i, body, job_id, state, due, key_index, attempt, tenant = unpack(job)
  local record, to, waits = KEYS[FIRST_KEY + i], state, 0
  if state == 'running' or (state == 'queued' and due <= at) then
    to = 'queued'
    redis.call('SET', record, put_in_line(streams, body, to, job_id) .. ' queued -')
  else
    redis.call('SET', record, '- ' .. state .. ' -\n' .. ARGV[FIRST_BODY + i])
    if parked[state] then
      redis.call('ZADD', parked[state], now, job_id)
    else
      waits = due
      due_at(state == 'retrying' and retry or delayed, job_id, due)
    end
  end
  -- Without an end: it outlives the open job. A key that somebody else has by now stays theirs.
  local holder = key_index > 0 and known[key_index]
  if key_index > 0 and (not holder or holder == job_id) then
    known[key_index] = job_id
    redis.call('SET', KEYS[FIRST_KEY + key_index], job_id)
  end
  reply[#reply + 1] = i
  moves[#moves + 1] = { job_id, state, to, attempt, body[RETRIES], waits, tenant }
end
reply[2] = feed(feed_key, feed_limit, reader, nonce, 'restored', now, '', moves)
for set, due in pairs(earliest) do tell_if_first(set, notices, number(due)) end
return reply
