-- move: an operator's move, by the same table as every other.
-- KEYS   1-3 streams  4 feed  5 result  6 dlq  7 retry  8 waiting  9 suspended  10 held  11 dead  12 delayed  13 control
--        14 waiters  15 notices  16 wake  17 record  18 idempotency key (or the record again)
-- ARGV   1 group  2 nonce  3 feed limit  4 job id  5 target  6 expected state ('' any)  7 the record's first line as last seen
--        8 body  9 data (who and why)  10 finished ttl  11 result limit  12 ledger (1|0)  13 dlq stream (1|0)
--        14 packed fields of a dead letter  15 consumer that holds retries in the pending list
--        16 has an idempotency key (1|0)  17 milliseconds the key outlives the job  18 attempt  19 retry count  20 error
--        21 owner and deliveries as last seen ('<owner> <deliveries>')  22 tenant  23 data of the steps after a dead letter
-- Reply  {'unknown'} | {'changed'} | {'illegal', from} | {'applied', from}
local streams = { KEYS[1], KEYS[2], KEYS[3] }
local group, nonce, feed_limit, job_id, target, expected = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local seen, body, data, ttl, result_limit = ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11]
local ledger, dlq_on, dlq_fields, parking = ARGV[12] == '1', ARGV[13] == '1', ARGV[14], ARGV[15]
local attempt, retry_count, error_text, tenant = ARGV[18], ARGV[19], ARGV[20], ARGV[22]
local record_key = KEYS[17]

local record = redis.call('GET', record_key)
if not record then return { 'unknown' } end
if string.match(record, '^[^\n]*') ~= seen then return { 'changed' } end
local place, from, token = header_of(record)
local line, id = split_place(place)
local row = line and redis.call('XPENDING', streams[line + 1], group, id, id, 1)[1]
-- A claim leaves the record as it was: only the pending list shows that somebody was faster.
if (row and row[2] .. ' ' .. row[4] or ' 0') ~= ARGV[21] then return { 'changed' } end
local running = row and row[2] ~= parking
if running then from = 'running' end
if (expected ~= '' and expected ~= from) or not MOVES[from][target] then return { 'illegal', from } end

check_types({ KEYS[4], KEYS[5], KEYS[15], dlq_on and KEYS[6] or KEYS[5], streams[1], streams[2], streams[3] },
  { KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12] }, { KEYS[13], KEYS[14] })
local body_values = target == 'queued' and cmsgpack.unpack(body)
local letter = dlq_fields ~= '' and cmsgpack.unpack(dlq_fields)

if line then
  redis.call('XACK', streams[line + 1], group, id)
  redis.call('XDEL', streams[line + 1], id)
end
for _, set in ipairs({ KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12] }) do redis.call('ZREM', set, job_id) end

local now = number(now_ms())
local moves = { job_id, from, target, attempt, retry_count, data, tenant }
local function park(state, set)
  redis.call('SET', record_key, '- ' .. state .. ' ' .. token .. '\n' .. body)
  if set then redis.call('ZADD', set, now, job_id) end
end
local function finish(state)
  redis.call('SET', record_key, '- ' .. state .. ' ' .. token .. '\n' .. body, 'PX', ttl)
  redis.call('XADD', KEYS[5], 'MAXLEN', '~', result_limit, '*', 'task_id', job_id, 'status', state,
    'error', error_text, 'retry_count', retry_count, 'finished_at', now)
  if ARGV[16] == '1' then redis.call('PEXPIRE', KEYS[18], ARGV[17]) end
  tell_waiters(KEYS[14], { job_id })
end
local function write_dead_letter()
  if dlq_on and letter then redis.call('XADD', KEYS[6], '*', 'failed_at', now, unpack(letter)) end
end

if target == 'queued' and tonumber(body_values[RUN_AT]) > tonumber(now) then
  park(target)
  redis.call('ZADD', KEYS[12], body_values[RUN_AT], job_id)
  tell_if_first(KEYS[12], KEYS[15], body_values[RUN_AT])
elseif target == 'queued' then
  redis.call('SET', record_key, put_in_line(streams, body_values, 'queued', job_id) .. ' queued ' .. token)
elseif target == 'suspended' then
  park(target, KEYS[9])
elseif target == 'waiting_approval' then
  park(target, KEYS[10])
elseif target == 'dlq_recorded' then
  write_dead_letter()
  park(target, KEYS[11])
elseif target == 'dlq_pending' and ledger then
  park(target, KEYS[11])
elseif target == 'dlq_pending' then
  write_dead_letter()
  for _, step in ipairs({ { 'dlq_pending', 'dlq_recorded' }, { 'dlq_recorded', 'failed' } }) do
    for _, value in ipairs({ job_id, step[1], step[2], attempt, retry_count, ARGV[23], tenant }) do moves[#moves + 1] = value end
  end
  finish('failed')
else -- cancelled, failed
  finish(target)
end
local reader = redis.call('HGET', KEYS[13], 'reader')
feed(KEYS[4], feed_limit, reader, nonce, 'moved', now, '', moves)
if running then redis.call('XADD', KEYS[15], 'MAXLEN', '~', 1000, '*', 'cancelled', job_id) end
return { 'applied', from }
