-- restore: write jobs in their states: lost ones, if the feed is still the one of the snapshot; or, in a verification, those
-- that the ledger knows better. These may be known, and may have ended.
-- KEYS   1-4 streams  5 feed  6 retry  7 suspended  8 held  9 dead  10 delayed  11 control  12 notices  13 wake  14 lanes
--        15 waiting  16 waiters  then n records, then idempotency keys, then streams of further lanes
-- ARGV   1 nonce  2 feed limit  3 position of the snapshot ('': the feed was empty)  4 its nonce  5 n
--        6 packed, 8 values per job: job id, state, due (0: now), index of its idempotency key (0: none), attempt, tenant,
--        fingerprint of its request, milliseconds the key outlives the job
--        7 epoch of the verification ('': the jobs are lost)  8 finished ttl  then n bodies, then the group, then declared lanes
-- Reply  {'forked'} | {'verified'} | {'lanes', …} | {'ok', feed id ('' if there was no event), indexes (from 1) of written jobs}
local streams, last_key = declared_streams()
local feed_key, retry, delayed, control, notices, wake = KEYS[5], KEYS[6], KEYS[10], KEYS[11], KEYS[12], KEYS[13]
local parked = { suspended = KEYS[7], waiting_approval = KEYS[8], dlq_pending = KEYS[9], dlq_recorded = KEYS[9] }
local assignment = new_assignment(streams, KEYS[14], control, ARGV[#ARGV - 1])
local nonce, feed_limit, position, n, group = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[5]), ARGV[#ARGV - 1]
local epoch, ttl = ARGV[7], ARGV[8]
local FIRST_KEY, FIRST_BODY, STRIDE = 16, 8, 8

local only_ended = false
if epoch ~= '' then
  -- Once the gate is open, jobs move: what the ledger has of open ones may be out of date.
  local gate = redis.call('HMGET', control, 'cleared', 'unverified')
  only_ended = gate[1] == EPOCH
  if epoch ~= EPOCH or (only_ended and not gate[2]) then return { 'verified' } end
elseif position == '' then
  if redis.call('XLEN', feed_key) > 0 then return { 'forked' } end
else
  local entry = redis.call('XRANGE', feed_key, position, position)[1]
  if not entry or nonce_of(entry[2]) ~= ARGV[4] then return { 'forked' } end
end
check_types({ notices, wake }, { retry, KEYS[7], KEYS[8], KEYS[9], delayed, KEYS[15] }, { KEYS[14], KEYS[16] })
check_types(streams, {}, {})
local jobs = cmsgpack.unpack(ARGV[6])
local known = redis.call('MGET', unpack(KEYS, FIRST_KEY + 1, last_key))
local reader = redis.call('HGET', control, 'reader')
local at = now_ms()
local now = format_integer(at)
local function is_ready(state, due) return state == 'running' or (state == 'queued' and due <= at) end
-- A record that cannot be read has no state: such a job has not ended.
local function is_ended(state) return MOVES[state] and not next(MOVES[state]) end
-- Whether this job is written: a lost one if it is still unknown, in a verification one that has not ended.
local function is_due(state, record)
  if not record or epoch == '' then return not record end
  local _, known_state = parse_record(record)
  return not is_ended(known_state) and (not only_ended or is_ended(state))
end
-- Whether a job is where it is to be: another verification has corrected it.
local function is_there(record, state, body)
  local position, known_state, _, packed = parse_record(record)
  local index, id = split_position(position)
  local attempts, retries
  if index then
    local entry = redis.call('XRANGE', streams[index + 1], id, id)[1]
    if #pending(streams[index + 1], group, id, id, 1) > 0 then return false end
    attempts, retries = string.match(entry and entry[2][2] or '', '^1 %S+ (%d+) (%d+) ')
  else
    local known_body = unpack_body(packed) or {}
    attempts, retries = known_body[ATTEMPTS], known_body[RETRIES]
  end
  return known_state == (state == 'running' and 'queued' or state) and attempts == body[ATTEMPTS] and retries == body[RETRIES]
end
local lost, restored = {}, {}
if epoch ~= '' then
  local undeclared = undeclared_positions(streams, { unpack(known, 1, n) })
  if undeclared then return undeclared end
end
for i = 1, n do
  local first = (i - 1) * STRIDE
  if is_due(jobs[first + 2], known[i]) and not restored[jobs[first + 1]] then
    restored[jobs[first + 1]] = true
    -- Unpacked here: it can fail, and no write may be followed by an error.
    local body = cmsgpack.unpack(ARGV[FIRST_BODY + i])
    if not known[i] or is_ended(jobs[first + 2]) or not is_there(known[i], jobs[first + 2], body) then
      lost[#lost + 1] = { i, body, unpack(jobs, first + 1, first + STRIDE) }
    end
    if is_ready(jobs[first + 2], jobs[first + 3]) then lane_for_tenant(assignment, body[TENANT]) end
  end
end
local missing = missing_lanes(assignment)
if missing then return missing end
if next(assignment.used) then open_lanes(assignment, wake) end

local reply, moves, earliest, ended = { 'ok', '' }, {}, {}, {}
-- Remove a job from where the engine has it.
local function remove(record, job_id)
  local index, id = split_position(position_of(record))
  if index then
    redis.call('XACK', streams[index + 1], group, id)
    redis.call('XDEL', streams[index + 1], id)
  end
  for _, set in ipairs({ retry, KEYS[7], KEYS[8], KEYS[9], delayed, KEYS[15] }) do redis.call('ZREM', set, job_id) end
end
local function schedule(set, job_id, due)
  redis.call('ZADD', set, format_integer(due), job_id)
  if not earliest[set] or due < earliest[set] then earliest[set] = due end
end

for _, job in ipairs(lost) do
  local i, body, job_id, state, due, key_index, attempt, tenant, fingerprint, keep = unpack(job)
  local record, to, waits = KEYS[FIRST_KEY + i], state, 0
  local origin = ''
  if known[i] then
    local _, _, token = parse_record(known[i])
    origin = origin_in(token)
    remove(known[i], job_id)
  end
  if is_ended(state) then
    redis.call('SET', record, '- ' .. state .. ' -' .. origin .. '\n' .. ARGV[FIRST_BODY + i], 'PX', ttl)
    ended[#ended + 1] = job_id
  elseif is_ready(state, due) then
    to = 'queued'
    local index = STREAMS_PER_LANE * assignment.lane_of[body[TENANT]] + tonumber(body[STREAM_INDEX])
    redis.call('SET', record, append_message(assignment, index, body, to, job_id) .. ' queued -' .. origin)
  else
    redis.call('SET', record, '- ' .. state .. ' -' .. origin .. '\n' .. ARGV[FIRST_BODY + i])
    if parked[state] then
      redis.call('ZADD', parked[state], now, job_id)
    else
      waits = due
      schedule(state == 'retrying' and retry or delayed, job_id, due)
    end
  end
  -- An open job's key has no expiry: it outlives the job. A key that another job has meanwhile taken keeps that job.
  local holder = key_index > 0 and known[key_index]
  if key_index > 0 and (not holder or parse_key(holder) == job_id) then
    known[key_index] = key_value(job_id, fingerprint)
    redis.call('SET', KEYS[FIRST_KEY + key_index], known[key_index])
    if is_ended(state) then redis.call('PEXPIRE', KEYS[FIRST_KEY + key_index], keep) end
  end
  reply[#reply + 1] = i
  if not is_ended(state) then moves[#moves + 1] = { job_id, state, to, attempt, body[RETRIES], waits, tenant } end
end
reply[2] = append_feed(feed_key, feed_limit, reader, nonce, 'restored', now, '', moves)
for set, due in pairs(earliest) do notify_if_earliest(set, notices, format_integer(due)) end
publish_finished(KEYS[16], ended)
return reply
