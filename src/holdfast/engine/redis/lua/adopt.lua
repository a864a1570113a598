-- adopt: turn foreign messages, just delivered to this worker, into jobs or dead letters. Also messages whose marker is not the
-- queue's: they are native if their records say so.
-- KEYS   1-4 streams  5 feed  6 result  7 dlq ('' if off)  8 dead  9 control  10 waiters  11 wake  then n records,
--        then m idempotency keys, then the m records of the jobs whose ids are these keys, then streams of further lanes
-- ARGV   1 group  2 worker  3 nonce  4 feed limit  5 n  6 finished ttl  7 result limit  8 ledger (1|0)  9 dlq stream (1|0)
--        then 18 per message: stream index, message id, delivery count, job id, fault ('' if well formed), body,
--        packed dlq fields, index of its idempotency key (0: none), type, payload, tenant, idempotency key, trace, meta,
--        old owner ('' unless it was just reclaimed), data of the dead letter's event,
--        fingerprint, header of a message with another marker ('?': it is unreadable; '': the message has none), then declared lanes
-- Reply  {'lanes', …} | one word per message: 'adopted' | 'native' | 'duplicate' | 'waits' (a duplicate of a delayed or retrying job)
--        | 'dead' | 'stale' | 'clash' (a malformed message with a known id)
local streams, last_key = declared_streams()
local feed_key, results, dlq, dead, control, waiters = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local group, worker, nonce, feed_limit, n = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local ttl, result_limit, ledger, dlq_on = ARGV[6], ARGV[7], ARGV[8] == '1', ARGV[9] == '1'
local wake, FIRST_KEY, FIRST_ARG, STRIDE = KEYS[11], 11, 9, 18

local controls = redis.call('HMGET', control, 'reader', 'limits')
check_types({ feed_key, results, dlq_on and dlq or results, controls[2] and wake or results }, { dead }, { waiters })
local known = redis.call('MGET', unpack(KEYS, FIRST_KEY + 1, last_key))
local number_of_keys = (last_key - FIRST_KEY - n) / 2
local missing = undeclared_positions(streams, { unpack(known, 1, n) })
  or undeclared_positions(streams, { unpack(known, n + number_of_keys + 1, n + 2 * number_of_keys) })
if missing then return missing end
local now = format_integer(now_ms())
local reply, moves, ended, dlq_fields, adopted, by_id, freed, claimed = {}, {}, {}, {}, {}, {}, {}, {}
-- The tenant of a known job: ids are unique in a queue, so a second message may have another tenant.
local function known_tenant(record)
  local position, _, _, body = parse_record(record)
  local index, id = split_position(position)
  if body ~= '' then return (unpack_body(body) or {})[TENANT] end
  local entry = index and redis.call('XRANGE', streams[index + 1], id, id)[1]
  return entry and tenant_of(entry[2])
end

-- The first job under a key, and the fingerprint of its request.
local function find_first(key_index, key, tenant)
  local value = known[key_index]
  if value then return parse_key(value) end
  local record = known[key_index + number_of_keys]
  if by_id[key] == tenant or (record and is_known_by_id(streams, record, key, tenant)) then return key, '' end
end

-- Whether the record says that holdfast wrote this message, which has another marker.
local function is_vouched(record, position, head)
  if #head < 2 or not record then return false end
  local own, _, token = parse_record(record)
  return own == position and origin_in(token) ~= FOREIGN
end

-- Record the claim of such a message. The token shows that it is recorded, if the reply is lost and the call repeated.
local function record_claim(key, record, stream, id, job_id, head, tenant)
  local position, state, token = parse_record(record)
  if string.sub(token, 1, 1) == '=' then return end
  -- First, because a full Redis allows it, and then the SET.
  redis.call('XCLAIM', stream, group, worker, 0, id, 'JUSTID')
  redis.call('SET', key, position .. ' ' .. state .. ' =' .. origin_in(token))
  local c = #claimed
  claimed[c + 1], claimed[c + 2], claimed[c + 3] = job_id, head, tenant ~= 'default' and tenant or ''
end

local function is_waiting(record)
  local position, state = parse_record(record)
  return state == 'retrying' or (state == 'queued' and not split_position(position))
end

-- End a job whose message is unreadable.
local function dead_letter(i, arg, job_id, tenant)
  local index, id, fault, body, record = ARGV[arg + 1], ARGV[arg + 2], ARGV[arg + 5], ARGV[arg + 6], KEYS[FIRST_KEY + i]
  local stream = streams[index + 1]
  redis.call('XACK', stream, group, id)
  redis.call('XDEL', stream, id)
  freed[tonumber(index)] = true
  moves[#moves + 1] = { 'dlq_pending', job_id, tenant, ARGV[arg + 16] }
  if ledger then
    redis.call('SET', record, '- dlq_pending -\n' .. body)
    redis.call('ZADD', dead, now, job_id)
  else
    if dlq_on then redis.call('XADD', dlq, '*', 'failed_at', now, unpack(dlq_fields[i])) end
    moves[#moves + 1] = { 'dlq_recorded', job_id, tenant }
    moves[#moves + 1] = { 'failed', job_id, tenant }
    redis.call('SET', record, '- failed -\n' .. body, 'PX', ttl)
    redis.call('XADD', results, 'MAXLEN', '~', result_limit, '*', 'task_id', job_id, 'status', 'failed',
      'error', fault, 'retry_count', 0, 'finished_at', now)
    ended[#ended + 1] = job_id
  end
end

for i = 1, n do
  local packed = ARGV[FIRST_ARG + (i - 1) * STRIDE + 7]
  dlq_fields[i] = packed ~= '' and cmsgpack.unpack(packed)
end
for i = 1, n do
  local arg = FIRST_ARG + (i - 1) * STRIDE
  local index, id, deliveries, job_id, fault = ARGV[arg + 1], ARGV[arg + 2], tonumber(ARGV[arg + 3]), ARGV[arg + 4], ARGV[arg + 5]
  local key_index = tonumber(ARGV[arg + 8])
  local stream, record, tenant = streams[index + 1], KEYS[FIRST_KEY + i], ARGV[arg + 11]
  local position = index .. ':' .. id
  local row = pending(stream, group, id, id, 1, worker)[1]
  local first, first_fingerprint
  if key_index > 0 then first, first_fingerprint = find_first(key_index, ARGV[arg + 12], tenant) end
  if not row or row[4] ~= deliveries then
    reply[i] = 'stale'
  elseif is_vouched(known[i], position, ARGV[arg + 18]) then
    -- `claim` did not know that the message is native; `reclaim`, which has the records, did.
    if deliveries == 1 then record_claim(record, known[i], stream, id, job_id, ARGV[arg + 18], tenant) end
    reply[i] = 'native'
  elseif known[i] and position_of(known[i]) == position then
    local owner = ARGV[arg + 15]
    if owner ~= '' then
      local retries = known_retries(known[i]) or '0'
      moves[#moves + 1] = { 'reclaimed', job_id, tenant, deliveries, owner, id, worker, retries }
    end
    reply[i] = 'adopted'
    if fault ~= '' then
      -- It was readable when it was adopted: by another version, or with a higher limit.
      dead_letter(i, arg, job_id, tenant)
      reply[i] = 'dead'
    end
  elseif (known[i] or adopted[job_id]) and fault ~= '' then
    reply[i] = 'clash'
  elseif known[i] or adopted[job_id] or (first and first ~= job_id) then
    local whose = first and tenant or adopted[job_id] or known_tenant(known[i])
    redis.call('XACK', stream, group, id)
    redis.call('XDEL', stream, id)
    freed[tonumber(index)] = true
    -- Not in the history of another tenant's job, nor if the message pretends to be holdfast's.
    if ARGV[arg + 18] == '' and (whose == '' and 'default' or whose) == tenant then
      local differs = first and is_key_reused(first_fingerprint, ARGV[arg + 17])
      moves[#moves + 1] = { 'duplicate', first or job_id, tenant, id, differs and 1 or 0 }
    end
    reply[i] = known[i] and is_waiting(known[i]) and 'waits' or 'duplicate'
  else
    -- A batch may have two copies.
    adopted[job_id] = tenant
    if key_index > 0 then
      known[key_index] = key_value(job_id, ARGV[arg + 17])
    else
      by_id[job_id] = tenant
    end
    moves[#moves + 1] = { 'created', job_id, tenant, ARGV[arg + 9], ARGV[arg + 10], ARGV[arg + 12], ARGV[arg + 13], ARGV[arg + 14] }
    if fault == '' then
      -- Renews the lease, and comes first because a full Redis allows it, and then the SET.
      redis.call('XCLAIM', stream, group, worker, 0, id, 'JUSTID')
      redis.call('SET', record, position .. ' queued -' .. FOREIGN)
      if key_index > 0 then redis.call('SET', KEYS[FIRST_KEY + key_index], known[key_index]) end
      -- Workers that died before they adopted it had attempts too; only the name of the last one is known.
      local owner = ARGV[arg + 15]
      moves[#moves + 1] = { 'claimed', job_id, tenant, 1, owner == '' and worker or owner }
      for lost = 2, deliveries do
        moves[#moves + 1] = { 'reclaimed', job_id, tenant, lost, owner, id, lost == deliveries and worker or owner, '0' }
      end
      reply[i] = 'adopted'
    else
      dead_letter(i, arg, job_id, tenant)
      reply[i] = 'dead'
    end
  end
end
append_feed(feed_key, feed_limit, controls[1], nonce, 'adopted', now, worker, moves)
append_feed(feed_key, feed_limit, controls[1], nonce, 'claimed', now, worker, claimed)
publish_finished(waiters, ended)
wake_if_limited(wake, controls[2], freed)
return reply
