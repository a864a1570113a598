-- settle: lease holders end their attempts.
-- KEYS   1-3 streams  4 feed  5 result  6 dlq  7 retry  8 waiting  9 suspended  10 held  11 dead  12 delayed  13 control
--        14 waiters  15 notices  then n records, then idempotency keys
-- ARGV   1 group  2 worker  3 nonce  4 feed limit  5 n  6 finished ttl  7 result limit  8 ledger (1|0)  9 dlq stream (1|0)
--        10 consumer that holds retries in the pending list ('' if they wait in a set)  11 pending idle
--        12-17 lowest and highest instant in each line ('' if none)
--        then 10 a job: line, message id, deliveries, job id, target state, body, data, attempt, retry count,
--        more ('' | packed {delay, index of its idempotency key (0: none), ms the key outlives the job, dead letter's fields})
-- Reply  position (from 1) and 'already' | 'stale' of each that was not applied
local streams = { KEYS[1], KEYS[2], KEYS[3] }
local feed_key, results, dlq, retry, waiting, suspended = KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local held_set, dead, delayed, control, waiters, notices = KEYS[10], KEYS[11], KEYS[12], KEYS[13], KEYS[14], KEYS[15]
local group, worker, nonce, feed_limit, n = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local ttl, result_limit, ledger, dlq_on = ARGV[6], ARGV[7], ARGV[8] == '1', ARGV[9] == '1'
local parking, pending_idle = ARGV[10], tonumber(ARGV[11])
local FIRST_KEY, FIRST_ARG, STRIDE = 15, 17, 10
local legal = MOVES['running']

-- Read: who holds what, and what do the records say?
local reader = redis.call('HGET', control, 'reader')
local records = redis.call('MGET', unpack(KEYS, FIRST_KEY + 1, FIRST_KEY + n))
local ids = { {}, {}, {} }
for arg = FIRST_ARG, FIRST_ARG + (n - 1) * STRIDE, STRIDE do
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
local reply, applied, leaving, done, more = {}, {}, { {}, {}, {} }, {}, {}
for i = 1, n do
  local arg = FIRST_ARG + (i - 1) * STRIDE
  local line, id, deliveries, target = ARGV[arg + 1] + 1, ARGV[arg + 2], ARGV[arg + 3], ARGV[arg + 5]
  local record = records[i]
  local verdict = 'stale'
  if held[line][id] == tonumber(deliveries) and legal[target] then
    if done[id] == line then
      verdict = 'already' -- the same attempt twice in one batch
    else
      done[id] = line
      if not record or string.find(record, ARGV[arg + 1] .. ':' .. id .. ' ', 1, true) == 1 then
        verdict = 'applied'
        applied[#applied + 1] = i
        -- Unpacked here: it can fail, and nothing may once writing has begun.
        if ARGV[arg + 10] ~= '' then more[i] = cmsgpack.unpack(ARGV[arg + 10]) end
        if target == 'queued' then more[i].body = cmsgpack.unpack(ARGV[arg + 6]) end
      end
      -- A copy of a job that is elsewhere, or has ended, leaves the line without a word more.
      if verdict == 'stale' or target ~= 'retrying' or parking == '' then
        leaving[line][#leaving[line] + 1] = id
      end
    end
  elseif record then
    local _, _, token = header_of(record)
    if token == ARGV[arg + 1] .. ':' .. id .. ':' .. deliveries .. ':' .. worker then verdict = 'already' end
  end
  if verdict ~= 'applied' then
    reply[#reply + 1] = i
    reply[#reply + 1] = verdict
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
local moves, m, ended, first_due = {}, 0, {}, {}

local function due_in(set, job_id, delay)
  local due = number(at + delay)
  redis.call('ZADD', set, due, job_id)
  if not first_due[set] or tonumber(due) < tonumber(first_due[set]) then first_due[set] = due end
  return due
end

local function finish(i, arg, state)
  local job_id = ARGV[arg + 4]
  redis.call('SET', KEYS[FIRST_KEY + i], '- ' .. state .. ' ' .. ARGV[arg + 1] .. ':' .. ARGV[arg + 2] .. ':' .. ARGV[arg + 3]
    .. ':' .. worker .. '\n' .. ARGV[arg + 6], 'PX', ttl)
  redis.call('XADD', results, '*', 'task_id', job_id, 'status', state,
    state == 'succeeded' and 'result' or 'error', ARGV[arg + 7], 'retry_count', ARGV[arg + 9], 'finished_at', now)
  if more[i] and more[i][2] > 0 then redis.call('PEXPIRE', KEYS[FIRST_KEY + more[i][2]], more[i][3]) end
  ended[#ended + 1] = job_id
end

-- Everything but success; returns when the job is due ('' if it waits for nothing).
local function settle_otherwise(i, arg, target)
  local place = ARGV[arg + 1] .. ':' .. ARGV[arg + 2]
  local token = place .. ':' .. ARGV[arg + 3] .. ':' .. worker
  local record, job_id, body, delay = KEYS[FIRST_KEY + i], ARGV[arg + 4], ARGV[arg + 6], more[i][1]
  if target == 'retrying' and parking == '' then
    redis.call('SET', record, '- retrying ' .. token .. '\n' .. body)
    return due_in(retry, job_id, delay)
  elseif target == 'retrying' then
    redis.call('XCLAIM', streams[ARGV[arg + 1] + 1], group, parking, 0, ARGV[arg + 2], 'JUSTID')
    redis.call('SET', record, place .. ' retrying ' .. token .. '\n' .. body)
    return due_in(waiting, job_id, math.max(delay, pending_idle))
  elseif target == 'queued' and delay > 0 then
    redis.call('SET', record, '- queued ' .. token .. '\n' .. body)
    return due_in(delayed, job_id, delay)
  elseif target == 'queued' then
    redis.call('SET', record, put_in_line(streams, more[i].body, 'queued', job_id) .. ' queued ' .. token)
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
  return ''
end

for _, i in ipairs(applied) do
  local arg = FIRST_ARG + (i - 1) * STRIDE
  local target, due = ARGV[arg + 5], ''
  if target == 'succeeded' then
    finish(i, arg, target)
  else
    due = settle_otherwise(i, arg, target)
  end
  moves[m + 1], moves[m + 2], moves[m + 3], moves[m + 4], moves[m + 5], moves[m + 6] =
    ARGV[arg + 4], target, ARGV[arg + 8], ARGV[arg + 9], ARGV[arg + 7], due
  m = m + 6
  if target == 'dlq_pending' and not ledger then
    -- Without a ledger the entry in the DLQ stream is the dead letter's record: it comes before `failed`.
    if dlq_on then redis.call('XADD', dlq, '*', 'failed_at', now, unpack(more[i][4])) end
    for _, state in ipairs({ 'dlq_recorded', 'failed' }) do
      moves[m + 1], moves[m + 2], moves[m + 3], moves[m + 4], moves[m + 5], moves[m + 6] =
        ARGV[arg + 4], state, ARGV[arg + 8], ARGV[arg + 9], '', ''
      m = m + 6
    end
    finish(i, arg, 'failed')
  end
end
feed(feed_key, feed_limit, reader, nonce, 'settled', now, worker, moves)
if #ended > 0 then
  redis.call('XTRIM', results, 'MAXLEN', '~', result_limit)
  tell_waiters(waiters, ended)
end
for set, due in pairs(first_due) do tell_if_first(set, notices, due) end
return reply
