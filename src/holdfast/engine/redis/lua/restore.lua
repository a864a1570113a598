-- restore: write lost jobs again in their states, if the feed is still the one of the snapshot.
-- KEYS   1-4 streams  5 feed  6 retry  7 suspended  8 held  9 dead  10 delayed  11 control  12 notices  13 wake  14 lanes
--        then n records, then idempotency keys, then streams of further lanes
-- ARGV   1 nonce  2 feed limit  3 position of the snapshot ('': the feed was empty)  4 its nonce  5 n
--        6 packed, 7 values per job: job id, state, due (0: now), index of its idempotency key (0: none), attempt, tenant,
--        fingerprint of its request
--        then n bodies, then the group, then declared lanes
-- Reply  {'forked'} | {'lanes', …} | {'ok', feed id ('' if nothing was restored), indexes (from 1) of restored jobs}
local streams, last_key = declared_streams()
local feed_key, retry, delayed, control, notices, wake = KEYS[5], KEYS[6], KEYS[10], KEYS[11], KEYS[12], KEYS[13]
local parked = { suspended = KEYS[7], waiting_approval = KEYS[8], dlq_pending = KEYS[9], dlq_recorded = KEYS[9] }
local assignment = new_assignment(streams, KEYS[14], control, ARGV[#ARGV - 1])
local nonce, feed_limit, position, n = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[5])
local FIRST_KEY, FIRST_BODY, STRIDE = 14, 6, 7

if position == '' then
  if redis.call('XLEN', feed_key) > 0 then return { 'forked' } end
else
  local entry = redis.call('XRANGE', feed_key, position, position)[1]
  if not entry or nonce_of(entry[2]) ~= ARGV[4] then return { 'forked' } end
end
check_types({ notices, wake }, { retry, KEYS[7], KEYS[8], KEYS[9], delayed }, { KEYS[14] })
check_types(streams, {}, {})
local jobs = cmsgpack.unpack(ARGV[6])
local known = redis.call('MGET', unpack(KEYS, FIRST_KEY + 1, last_key))
local reader = redis.call('HGET', control, 'reader')
local at = now_ms()
local now = format_integer(at)
local function is_ready(state, due) return state == 'running' or (state == 'queued' and due <= at) end
local lost, restored = {}, {}
for i = 1, n do
  local first = (i - 1) * STRIDE
  if not known[i] and not restored[jobs[first + 1]] then
    restored[jobs[first + 1]] = true
    -- Unpacked here: it can fail, and no write may be followed by an error.
    local body = cmsgpack.unpack(ARGV[FIRST_BODY + i])
    lost[#lost + 1] = { i, body, unpack(jobs, first + 1, first + STRIDE) }
    if is_ready(jobs[first + 2], jobs[first + 3]) then lane_for_tenant(assignment, body[TENANT]) end
  end
end
local missing = missing_lanes(assignment)
if missing then return missing end
if next(assignment.used) then open_lanes(assignment, wake) end

local reply, moves, earliest = { 'ok', '' }, {}, {}
local function schedule(set, job_id, due)
  redis.call('ZADD', set, format_integer(due), job_id)
  if not earliest[set] or due < earliest[set] then earliest[set] = due end
end

for _, job in ipairs(lost) do
  local i, body, job_id, state, due, key_index, attempt, tenant, fingerprint = unpack(job)
  local record, to, waits = KEYS[FIRST_KEY + i], state, 0
  if is_ready(state, due) then
    to = 'queued'
    local index = STREAMS_PER_LANE * assignment.lane_of[body[TENANT]] + tonumber(body[STREAM_INDEX])
    redis.call('SET', record, append_message(assignment, index, body, to, job_id) .. ' queued -')
  else
    redis.call('SET', record, '- ' .. state .. ' -\n' .. ARGV[FIRST_BODY + i])
    if parked[state] then
      redis.call('ZADD', parked[state], now, job_id)
    else
      waits = due
      schedule(state == 'retrying' and retry or delayed, job_id, due)
    end
  end
  -- Without an expiry: it outlives the open job. A key that another job has meanwhile taken keeps that job.
  local holder = key_index > 0 and known[key_index]
  if key_index > 0 and (not holder or parse_key(holder) == job_id) then
    known[key_index] = key_value(job_id, fingerprint)
    redis.call('SET', KEYS[FIRST_KEY + key_index], known[key_index])
  end
  reply[#reply + 1] = i
  moves[#moves + 1] = { job_id, state, to, attempt, body[RETRIES], waits, tenant }
end
reply[2] = append_feed(feed_key, feed_limit, reader, nonce, 'restored', now, '', moves)
for set, due in pairs(earliest) do notify_if_earliest(set, notices, format_integer(due)) end
return reply
