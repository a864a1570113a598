-- settle: end attempts of jobs that the worker has leased.
-- KEYS   1-4 streams  5 feed  6 result  7 dlq  8 retry  9 waiting  10 suspended  11 held  12 dead  13 delayed  14 control
--        15 waiters  16 notices  17 wake  18 lanes  then n records, then idempotency keys, then streams of further lanes
-- ARGV   1 group  2 worker  3 nonce  4 feed limit  5 n  6 finished ttl  7 result limit  8 ledger (1|0)  9 dlq stream (1|0)
--        10 consumer that holds retries in the pending list ('' if they wait in a set)
--        11 packed, 4 values per stream that has jobs: stream index, number of jobs, lowest and highest instant of their messages
--        12 packed, 10 values per job: stream index, message id, delivery count, token, job id, target state, data, attempt, retry count,
--        more (0 | {delay, index of its idempotency key (0: none), ms the key outlives the job, dead letter's fields,
--        tenant ('' for the default one)}; the tenant is for the feed, the script does not use it)
--        then n bodies, then declared lanes
-- Reply  {'lanes', …} | index (from 1) and 'already' | 'stale' of each verdict that was not applied
local streams = declared_streams()
local feed_key, results, dlq, retry, waiting, suspended = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local held_set, dead, delayed, control, waiters, notices = KEYS[11], KEYS[12], KEYS[13], KEYS[14], KEYS[15], KEYS[16]
local wake, assignment = KEYS[17], new_assignment(streams, KEYS[18], KEYS[14], ARGV[1])
local group, worker, nonce, feed_limit, n = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local ttl, result_limit, ledger, dlq_on = ARGV[6], ARGV[7], ARGV[8] == '1', ARGV[9] == '1'
local retry_consumer = ARGV[10]
-- One packed argument: nine per job would cost Redis more than the jobs themselves.
local spans, jobs = cmsgpack.unpack(ARGV[11]), cmsgpack.unpack(ARGV[12])
local FIRST_KEY, FIRST_BODY, STRIDE = 18, 12, 10
local STREAM_AT, ID_AT, DELIVERIES_AT, TOKEN_AT, JOB_AT, TARGET_AT, DATA_AT, RETRIES_AT, MORE_AT = 1, 2, 3, 4, 5, 6, 7, 9, 10
local legal = MOVES['running']

-- Read leases and records.
check_types({ feed_key, results }, {}, { waiters })
for at = 0, (n - 1) * STRIDE, STRIDE do
  if jobs[at + TARGET_AT] ~= 'succeeded' then
    check_types({ notices, dlq_on and dlq or results }, { retry, waiting, suspended, held_set, dead, delayed }, {})
    break
  end
end
local controls = redis.call('HMGET', control, 'reader', 'limits')
local records = redis.call('MGET', unpack(KEYS, FIRST_KEY + 1, FIRST_KEY + n))
local function ids_of(index)
  local ids = {}
  for at = 0, (n - 1) * STRIDE, STRIDE do
    if jobs[at + STREAM_AT] == index then ids[#ids + 1] = jobs[at + ID_AT] end
  end
  return ids
end
local leased, leaving = {}, {}
for at = 1, #spans, 4 do
  local index, count, low, high = unpack(spans, at, at + 3)
  leased[index] = deliveries_held(streams[index + 1], group, worker, count, low, high, function() return ids_of(index) end)
  leaving[index] = {}
end

-- Whether the record has this position: it begins with `<stream index>:<id> `.
local function is_current(record, index, id)
  local position = POSITION_PREFIX[index]
  local first, last = #position + 1, #position + #id
  return string.sub(record, first, last) == id and string.byte(record, last + 1) == 32
    and string.sub(record, 1, #position) == position
end

-- Decide. The fence is (message, worker, delivery count), and the record must have this position.
local reply, skipped, released, indexes = {}, {}, {}, {}
for i = 1, n do
  local at = (i - 1) * STRIDE
  local index, id, deliveries, target = jobs[at + STREAM_AT], jobs[at + ID_AT], jobs[at + DELIVERIES_AT], jobs[at + TARGET_AT]
  local record, has = records[i], leased[index][id]
  local verdict = 'stale'
  if has == deliveries and legal[target] then
    leased[index][id] = -deliveries -- done
    if not record or is_current(record, index, id) then
      verdict = nil
      -- Unpacked here: it can fail, and no write may be followed by an error.
      if target == 'queued' then
        local body = cmsgpack.unpack(ARGV[FIRST_BODY + i])
        released[i] = body
        if jobs[at + MORE_AT][1] <= 0 then indexes[i] = STREAMS_PER_LANE * (lane_for_tenant(assignment, body[TENANT]) or 0) + tonumber(body[STREAM_INDEX]) end
      end
    end
    -- A copy of a job that is elsewhere or has finished is removed from the stream without an event.
    if verdict or target ~= 'retrying' or retry_consumer == '' then
      local of_index = leaving[index]
      of_index[#of_index + 1] = id
    end
  elseif has == -deliveries then
    verdict = 'already' -- the same attempt twice in one batch
  elseif record then
    local _, _, token = parse_record(record)
    local own = jobs[at + TOKEN_AT]
    if token == own or token == own .. origin_in(token) then verdict = 'already' end
  end
  if verdict then
    reply[#reply + 1], reply[#reply + 2] = i, verdict
    skipped[#skipped + 1] = i
    jobs[at + TARGET_AT] = false
  end
end

local missing = missing_lanes(assignment)
if missing then return missing end

-- Write. XACK and XDEL come first: they free memory, so that a full Redis still drains.
for index, of_index in pairs(leaving) do
  in_chunks(of_index, function(...)
    redis.call('XACK', streams[index + 1], group, ...)
    redis.call('XDEL', streams[index + 1], ...)
  end)
end
if #skipped == n then
  wake_if_limited(wake, controls[2], leaving) -- a copy may have used a slot
  return reply
end
if next(indexes) then open_lanes(assignment, wake) end

local now_at = now_ms()
local now = format_integer(now_at)
local ended, first_due = {}, {}

local function schedule(set, job_id, delay)
  local due = format_integer(now_at + delay)
  redis.call('ZADD', set, due, job_id)
  if not first_due[set] or tonumber(due) < tonumber(first_due[set]) then first_due[set] = due end
end

local function finish(i, at, state)
  local job_id, more = jobs[at + JOB_AT], jobs[at + MORE_AT]
  call('PSETEX', KEYS[FIRST_KEY + i], ttl, '- ' .. state .. ' ' .. jobs[at + TOKEN_AT] .. '\n' .. ARGV[FIRST_BODY + i])
  call('XADD', results, '*', 'task_id', job_id, 'status', state,
    state == 'succeeded' and 'result' or 'error', jobs[at + DATA_AT], 'retry_count', jobs[at + RETRIES_AT], 'finished_at', now)
  if more ~= 0 and more[2] > 0 then redis.call('PEXPIRE', KEYS[FIRST_KEY + more[2]], more[3]) end
  ended[#ended + 1] = job_id
end

-- Everything but success.
local function settle_slow(i, at, target)
  local index, id = jobs[at + STREAM_AT], jobs[at + ID_AT]
  local token = jobs[at + TOKEN_AT]
  if records[i] then
    local _, _, known = parse_record(records[i])
    token = token .. origin_in(known)
  end
  local record, job_id, body, delay = KEYS[FIRST_KEY + i], jobs[at + JOB_AT], ARGV[FIRST_BODY + i], jobs[at + MORE_AT][1]
  if target == 'retrying' and retry_consumer == '' then
    redis.call('SET', record, '- retrying ' .. token .. '\n' .. body)
    schedule(retry, job_id, delay)
  elseif target == 'retrying' then
    redis.call('XCLAIM', streams[index + 1], group, retry_consumer, 0, id, 'JUSTID')
    redis.call('SET', record, POSITION_PREFIX[index] .. id .. ' retrying ' .. token .. '\n' .. body)
    schedule(waiting, job_id, delay)
  elseif target == 'queued' and delay > 0 then
    redis.call('SET', record, '- queued ' .. token .. '\n' .. body)
    schedule(delayed, job_id, delay)
  elseif target == 'queued' then
    redis.call('SET', record, append_message(assignment, indexes[i], released[i], 'queued', job_id) .. ' queued ' .. token)
  elseif target == 'suspended' then
    redis.call('SET', record, '- suspended ' .. token .. '\n' .. body)
    redis.call('ZADD', suspended, now, job_id)
  elseif target == 'waiting_approval' then
    redis.call('SET', record, '- waiting_approval ' .. token .. '\n' .. body)
    redis.call('ZADD', held_set, now, job_id)
  elseif ledger then -- dlq_pending: the ledger records the dead letter, then moves the job
    redis.call('SET', record, '- dlq_pending ' .. token .. '\n' .. body)
    redis.call('ZADD', dead, now, job_id)
  else
    -- Without a ledger the entry in the DLQ stream is the record of the dead letter: it is written before `failed`.
    if dlq_on then redis.call('XADD', dlq, '*', 'failed_at', now, unpack(jobs[at + MORE_AT][4])) end
    finish(i, at, 'failed')
  end
end

for i = 1, n do
  local at = (i - 1) * STRIDE
  local target = jobs[at + TARGET_AT]
  if target == 'succeeded' then
    finish(i, at, target)
  elseif target then
    settle_slow(i, at, target)
  end
end
append_packed_feed(feed_key, feed_limit, controls[1], nonce, ledger and 'settled_for_ledger' or 'settled', now, worker, ARGV[12], skipped)
if #ended > 0 then
  redis.call('XTRIM', results, 'MAXLEN', '~', result_limit)
  publish_finished(waiters, ended)
end
for set, due in pairs(first_due) do notify_if_earliest(set, notices, due) end
wake_if_limited(wake, controls[2], leaving)
return reply
