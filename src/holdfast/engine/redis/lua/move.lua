-- move: an operator's move, checked with the same table as every other move.
-- KEYS   1-4 streams  5 feed  6 result  7 dlq  8 retry  9 waiting  10 suspended  11 held  12 dead  13 delayed  14 control
--        15 waiters  16 notices  17 wake  18 lanes  19 record  20 idempotency key (or the record again)
--        then streams of further lanes
-- ARGV   1 group  2 nonce  3 feed limit  4 job id  5 target  6 expected state ('' any)  7 the record's first line as last read
--        8 body  9 data (who and why)  10 finished ttl  11 result limit  12 ledger (1|0)  13 dlq stream (1|0)
--        14 packed fields of a dead letter  15 consumer that holds retries in the pending list
--        16 has an idempotency key (1|0)  17 milliseconds the key outlives the job  18 attempt  19 retry count  20 error
--        21 owner and delivery count as last read ('<owner> <deliveries>')  22 tenant  23 data of the steps after a dead letter
--        24 event ('': the default one)  25 the operator's event ('': none)  26 its data  27 declared lanes
-- Reply  {'unknown'} | {'changed'} | {'lanes', …} | {'illegal', from} | {'applied', from}
local streams = declared_streams()
local feed_key, results, dlq, retry, waiting, suspended = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local held_set, dead, delayed, control, waiters, notices = KEYS[11], KEYS[12], KEYS[13], KEYS[14], KEYS[15], KEYS[16]
local wake, assignment = KEYS[17], new_assignment(streams, KEYS[18], KEYS[14], ARGV[1])
local group, nonce, feed_limit, job_id, target, expected = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local header, body, data, ttl, result_limit = ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11]
local ledger, dlq_on, dlq_fields, retry_consumer = ARGV[12] == '1', ARGV[13] == '1', ARGV[14], ARGV[15]
local attempt, retry_count, error_text, tenant = ARGV[18], ARGV[19], ARGV[20], ARGV[22]
local record_key = KEYS[19]

local record = redis.call('GET', record_key)
if not record then return { 'unknown' } end
if string.match(record, '^[^\n]*') ~= header then return { 'changed' } end
local missing = undeclared_positions(streams, { record })
if missing then return missing end
local position, from, token = parse_record(record)
local index, id = split_position(position)
local row = index and pending(streams[index + 1], group, id, id, 1)[1]
-- A claim does not change the record: only the pending list shows a concurrent claim.
if (row and row[2] .. ' ' .. row[4] or ' 0') ~= ARGV[21] then return { 'changed' } end
local running = row and row[2] ~= retry_consumer
if running then from = 'running' end
if not MOVES[from] then return { 'unknown' } end
if (expected ~= '' and expected ~= from) or not MOVES[from][target] then return { 'illegal', from } end

check_types({ feed_key, results, notices, wake, dlq_on and dlq or results },
  { retry, waiting, suspended, held_set, dead, delayed }, { control, waiters, KEYS[18] })
check_types(streams, {}, {})
local at = now_ms()
local now = format_integer(at)
local body_values = target == 'queued' and cmsgpack.unpack(body)
local dead_letter = dlq_fields ~= '' and cmsgpack.unpack(dlq_fields)
local to_index
if body_values and tonumber(body_values[RUN_AT]) <= at then
  to_index = STREAMS_PER_LANE * (lane_for_tenant(assignment, body_values[TENANT]) or 0) + tonumber(body_values[STREAM_INDEX])
end
missing = missing_lanes(assignment)
if missing then return missing end
local controls = redis.call('HMGET', control, 'reader', 'limits')

if index then
  redis.call('XACK', streams[index + 1], group, id)
  redis.call('XDEL', streams[index + 1], id)
end
for _, set in ipairs({ retry, waiting, suspended, held_set, dead, delayed }) do redis.call('ZREM', set, job_id) end

local moves = { ARGV[24], job_id, from, target, attempt, retry_count, data, tenant }
local function park(state, set)
  redis.call('SET', record_key, '- ' .. state .. ' ' .. token .. '\n' .. body)
  if set then redis.call('ZADD', set, now, job_id) end
end
local function finish(state)
  redis.call('SET', record_key, '- ' .. state .. ' ' .. token .. '\n' .. body, 'PX', ttl)
  redis.call('XADD', results, 'MAXLEN', '~', result_limit, '*', 'task_id', job_id, 'status', state,
    'error', error_text, 'retry_count', retry_count, 'finished_at', now)
  if ARGV[16] == '1' then redis.call('PEXPIRE', KEYS[20], ARGV[17]) end
  publish_finished(waiters, { job_id })
end
local function write_dead_letter()
  if dlq_on and dead_letter then redis.call('XADD', dlq, '*', 'failed_at', now, unpack(dead_letter)) end
end

if to_index then
  open_lanes(assignment, wake)
  redis.call('SET', record_key, append_message(assignment, to_index, body_values, 'queued', job_id) .. ' queued ' .. token)
elseif target == 'queued' then
  park(target)
  redis.call('ZADD', delayed, body_values[RUN_AT], job_id)
  notify_if_earliest(delayed, notices, body_values[RUN_AT])
elseif target == 'suspended' then
  park(target, suspended)
elseif target == 'waiting_approval' then
  park(target, held_set)
elseif target == 'dlq_recorded' then
  write_dead_letter()
  park(target, dead)
elseif target == 'dlq_pending' and ledger then
  park(target, dead)
elseif target == 'dlq_pending' then
  write_dead_letter()
  for _, step in ipairs({ { 'dlq_pending', 'dlq_recorded' }, { 'dlq_recorded', 'failed' } }) do
    for _, value in ipairs({ '', job_id, step[1], step[2], attempt, retry_count, ARGV[23], tenant }) do moves[#moves + 1] = value end
  end
  finish('failed')
else -- cancelled, failed
  finish(target)
end
if ARGV[25] ~= '' then
  for _, value in ipairs({ ARGV[25], job_id, '', '', 0, 0, ARGV[26], tenant }) do moves[#moves + 1] = value end
end
append_feed(feed_key, feed_limit, controls[1], nonce, 'operator', now, '', moves)
if running then
  redis.call('XADD', notices, 'MAXLEN', '~', 1000, '*', 'cancelled', job_id)
  wake_if_limited(wake, controls[2], { [index] = true })
end
return { 'applied', from }
