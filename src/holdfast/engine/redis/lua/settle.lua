-- settle: lease holders end their attempts.
-- KEYS   1-3 streams  4 feed  5 result  6 dlq  7 retry  8 waiting  9 suspended  10 held  11 dead  12 delayed  13 control
--        14 waiters  15 notices  then n records, then idempotency keys
-- ARGV   1 group  2 worker  3 nonce  4 feed limit  5 n  6 finished ttl  7 result limit  8 ledger (1|0)  9 dlq stream (1|0)
--        10 consumer that holds retries in the pending list ('' if they wait in a set)  11 pending idle
--        12-17 lowest and highest message id in each line ('' if none)
--        then 13 a job: line, message id, deliveries, job id, target state, body, data, delay, attempt, retry count,
--        index of its idempotency key (0: none), milliseconds the key outlives the job, packed fields of a dead letter
-- Reply  one word a job: 'applied' | 'already' | 'stale'
local streams = { KEYS[1], KEYS[2], KEYS[3] }
local feed_key, results, dlq, retry, waiting, suspended = KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local held_set, dead, delayed, control, waiters, notices = KEYS[10], KEYS[11], KEYS[12], KEYS[13], KEYS[14], KEYS[15]
local group, worker, nonce, feed_limit, n = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local ttl, result_limit, ledger, dlq_on = ARGV[6], ARGV[7], ARGV[8] == '1', ARGV[9] == '1'
local parking, pending_idle = ARGV[10], tonumber(ARGV[11])
local FIRST_KEY, FIRST_ARG, STRIDE = 15, 17, 13

-- Read: who holds what, and what do the records say?
local reader = redis.call('HGET', control, 'reader')
local records = redis.call('MGET', unpack(KEYS, FIRST_KEY + 1, FIRST_KEY + n))
local ids = { {}, {}, {} }
for i = 1, n do
  local arg = FIRST_ARG + (i - 1) * STRIDE
  local of_line = ids[ARGV[arg + 1] + 1]
  of_line[#of_line + 1] = ARGV[arg + 2]
end
local held = {}
for line = 1, 3 do
  if #ids[line] > 0 then
    held[line] = deliveries_held(streams[line], group, worker, ids[line], ARGV[10 + 2 * line], ARGV[11 + 2 * line])
  end
end

-- Decide. The fence is (message, worker, delivery count), and the record must agree that the job is here.
local reply, applied, leaving, done = {}, {}, { {}, {}, {} }, {}
local unpacked = {} -- unpacking can fail, and nothing may once writing has begun
for i = 1, n do
  local arg = FIRST_ARG + (i - 1) * STRIDE
  local line, id, deliveries, target = tonumber(ARGV[arg + 1]) + 1, ARGV[arg + 2], ARGV[arg + 3], ARGV[arg + 5]
  local record = records[i]
  local place = ARGV[arg + 1] .. ':' .. id
  if done[place] then
    -- The same attempt twice in one batch.
    reply[i] = 'already'
  elseif held[line][id] == tonumber(deliveries) and MOVES['running'][target] then
    local here = not record or string.find(record, place .. ' ', 1, true) == 1
    if here then
      reply[i] = 'applied'
      applied[#applied + 1] = i
      done[place] = true
      if target == 'queued' then
        unpacked[i] = cmsgpack.unpack(ARGV[arg + 6])
      elseif target == 'dlq_pending' then
        unpacked[i] = cmsgpack.unpack(ARGV[arg + 13])
      end
    else
      reply[i] = 'stale'
    end
    -- A copy of a job that is elsewhere, or has ended, leaves the line without a word more.
    if not (here and target == 'retrying' and parking ~= '') then
      leaving[line][#leaving[line] + 1] = id
    end
  else
    local _, _, token = header_of(record or '')
    reply[i] = token == place .. ':' .. deliveries .. ':' .. worker and 'already' or 'stale'
  end
end

-- Write. XACK and XDEL come first: they free memory, so that a full Redis still drains.
for line = 1, 3 do
  in_chunks(leaving[line], function(...)
    redis.call('XACK', streams[line], group, ...)
    redis.call('XDEL', streams[line], ...)
  end)
end
if #applied == 0 then return reply end

local at = now_ms()
local now = number(at)
local moves, ended, first_due = {}, {}, {}

local function due_in(set, job_id, due)
  redis.call('ZADD', set, due, job_id)
  if not first_due[set] or tonumber(due) < tonumber(first_due[set]) then first_due[set] = due end
end

local function finish(i, arg, state, token)
  local job_id, data, key_index = ARGV[arg + 4], ARGV[arg + 7], tonumber(ARGV[arg + 11])
  redis.call('SET', KEYS[FIRST_KEY + i], '- ' .. state .. ' ' .. token .. '\n' .. ARGV[arg + 6], 'PX', ttl)
  redis.call('XADD', results, 'MAXLEN', '~', result_limit, '*', 'task_id', job_id, 'status', state,
    state == 'succeeded' and 'result' or 'error', data, 'retry_count', ARGV[arg + 10], 'finished_at', now)
  if key_index > 0 then redis.call('PEXPIRE', KEYS[FIRST_KEY + key_index], ARGV[arg + 12]) end
  ended[#ended + 1] = job_id
end

for _, i in ipairs(applied) do
  local arg = FIRST_ARG + (i - 1) * STRIDE
  local place = ARGV[arg + 1] .. ':' .. ARGV[arg + 2]
  local token = place .. ':' .. ARGV[arg + 3] .. ':' .. worker
  local job_id, target, body, data, delay = ARGV[arg + 4], ARGV[arg + 5], ARGV[arg + 6], ARGV[arg + 7], tonumber(ARGV[arg + 8])
  local record, due = KEYS[FIRST_KEY + i], ''
  if target == 'succeeded' then
    finish(i, arg, target, token)
  elseif target == 'retrying' and parking == '' then
    due = number(at + delay)
    redis.call('SET', record, '- retrying ' .. token .. '\n' .. body)
    due_in(retry, job_id, due)
  elseif target == 'retrying' then
    due = number(at + math.max(delay, pending_idle))
    local line = streams[ARGV[arg + 1] + 1]
    redis.call('XCLAIM', line, group, parking, 0, ARGV[arg + 2], 'JUSTID')
    redis.call('SET', record, place .. ' retrying ' .. token .. '\n' .. body)
    due_in(waiting, job_id, due)
  elseif target == 'queued' and delay > 0 then
    due = number(at + delay)
    redis.call('SET', record, '- queued ' .. token .. '\n' .. body)
    due_in(delayed, job_id, due)
  elseif target == 'queued' then
    redis.call('SET', record, put_in_line(streams, unpacked[i], 'queued', job_id) .. ' queued ' .. token)
  elseif target == 'suspended' then
    redis.call('SET', record, '- suspended ' .. token .. '\n' .. body)
    redis.call('ZADD', suspended, now, job_id)
  elseif target == 'waiting_approval' then
    redis.call('SET', record, '- waiting_approval ' .. token .. '\n' .. body)
    redis.call('ZADD', held_set, now, job_id)
  elseif ledger then -- dlq_pending: the ledger records the dead letter, then moves the job on
    redis.call('SET', record, '- dlq_pending ' .. token .. '\n' .. body)
    redis.call('ZADD', dead, now, job_id)
  end
  local m = #moves
  moves[m + 1], moves[m + 2], moves[m + 3], moves[m + 4], moves[m + 5], moves[m + 6] =
    job_id, target, ARGV[arg + 9], ARGV[arg + 10], data, due
  if target == 'dlq_pending' and not ledger then
    -- Without a ledger the entry in the DLQ stream is the dead letter's record: it comes before `failed`.
    if dlq_on then redis.call('XADD', dlq, '*', 'failed_at', now, unpack(unpacked[i])) end
    for _, next_state in ipairs({ 'dlq_recorded', 'failed' }) do
      m = #moves
      moves[m + 1], moves[m + 2], moves[m + 3], moves[m + 4], moves[m + 5], moves[m + 6] =
        job_id, next_state, ARGV[arg + 9], ARGV[arg + 10], '', ''
    end
    finish(i, arg, 'failed', token)
  end
end
feed(feed_key, feed_limit, reader, nonce, 'settled', now, worker, moves)
for set, due in pairs(first_due) do tell_if_first(set, notices, due) end
tell_waiters(waiters, ended)
return reply
